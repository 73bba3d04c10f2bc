#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace ds_slide {

class File;
struct Request;

/// What one call of submit() asked for, and how far it has come.
struct Transfer {
  struct Piece {
    File* file;
    std::int64_t offset;
    char* address;
    std::int64_t nbytes;
  };
  std::int64_t token = 0;
  bool write = false;
  std::vector<Piece> pieces;

  std::size_t piece = 0;       // the next request is cut from this one,
  std::int64_t cut_bytes = 0;  // after so many bytes
  unsigned in_flight = 0;      // requests
  int error = 0;               // of the first request that failed, an errno
  std::string message;

  [[nodiscard]] bool all_started() const noexcept { return piece == pieces.size(); }
  /// No further request is cut; the first reason is kept.
  void fail(int reason, std::string sentence);
};

/// Transfers with requests still to be cut, first in, first out.
class TransferQueue {
 public:
  [[nodiscard]] bool empty() const noexcept { return _transfers.empty(); }
  void push(Transfer& transfer) { _transfers.push_back(&transfer); }
  /// The next request, of at most `max_bytes`. The queue must not be empty.
  void cut(Request& request, std::uint32_t max_bytes);
  /// Takes out a transfer that may or may not be in the queue.
  void remove(Transfer& transfer);
  [[nodiscard]] Transfer* pop();

 private:
  std::deque<Transfer*> _transfers;
};

enum class Outcome { done, repeat, failed };
struct Verdict {
  Outcome outcome = Outcome::done;
  int error = 0;
  std::string message;
};

/// What the result of a request (bytes moved, or -errno) means. For `repeat` the request has been changed to
/// what is still to be done.
Verdict judge(Request& request, std::int64_t result);

}  // namespace ds_slide
