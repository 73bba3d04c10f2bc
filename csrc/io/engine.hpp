#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ds_slide {

/// Asynchronous transfers between memory and files, several requests in flight, for use from several threads.
///
/// A transfer is a list of pieces; it is cut into requests, and completes once, when all of them have ended.
/// Transfers start in the order of submit(), urgent ones before all others, reads and writes in turns while
/// both wait, but overlap and may end in any order: a caller that wants to read what a transfer writes waits
/// for its completion first.
///
/// The memory of a transfer belongs to the engine from submit() until next() returns its token. After a fork
/// the engine is the parent's: in the child every call throws std::runtime_error and the destructor does
/// nothing.
class IoEngine {
 public:
  struct Piece {
    std::int64_t file, offset;
    std::uintptr_t address;
    std::int64_t nbytes;
  };
  struct Finished {
    std::int64_t token;
    int error;            // 0, or an errno
    std::string message;  // a sentence if error is not 0
  };
  struct Stats {
    std::int64_t read_bytes, written_bytes, read_requests,
        write_requests;              // of requests that moved all they should
    std::int64_t repeated_requests;  // sent again after an interruption or for the rest of a short transfer
    double busy_s, read_busy_s, write_busy_s;  // wall time with at least one request (read, write) in flight
    std::int64_t in_flight;                    // requests
    std::int64_t unfinished;                   // transfers
    std::int64_t registered_bytes, registered_files, direct_files, buffered_files;
    std::int64_t burst_bytes;      // after which reads and writes take turns now
    std::int64_t depth;            // requests that may be at the device now, urgent ones apart
    double latency_s;              // of a request at the device, mean
    std::string skipped_backends;  // which "auto" could not use and why
  };

  /// `backend`: auto, io_uring, libaio or threads. At most `queue_depth` requests of at most `request_bytes`
  /// bytes are at the device. While reads and writes both wait they take turns after `burst_bytes`. 0 means
  /// after each request; without a value the engine measures which is faster. With `low_depth` at most that
  /// many requests are at the device, unless more are measured to be faster. Urgent transfers wait for
  /// neither. Throws std::invalid_argument, and std::runtime_error when the backend cannot be used.
  IoEngine(std::string const& backend, std::int64_t queue_depth, std::int64_t request_bytes,
           std::optional<std::int64_t> burst_bytes = std::nullopt,
           std::optional<std::int64_t> low_depth = std::nullopt);
  ~IoEngine();
  IoEngine(IoEngine const&) = delete;
  IoEngine& operator=(IoEngine const&) = delete;

  [[nodiscard]] std::string backend() const;

  /// Makes (nbytes > 0) or opens (nbytes = 0) a file, or takes an open one, as File does. Returns its number,
  /// for submit().
  std::int64_t open(std::string const& path, std::int64_t nbytes,
                    std::optional<int> descriptor = std::nullopt);
  [[nodiscard]] bool is_direct(std::int64_t file) const;
  /// Blocks until what finished transfers wrote is on the device. Throws FileError.
  void sync(std::int64_t file) const;

  /// Lets the kernel keep the pages of a range at hand. False when backend or RLIMIT_MEMLOCK do not allow it.
  /// The range must stay mapped until unregister_memory(), close() or the end.
  bool register_memory(std::uintptr_t address, std::size_t nbytes);
  /// For a range as it was registered, with no transfer under way in it; otherwise does nothing.
  void unregister_memory(std::uintptr_t address);

  /// Throws std::invalid_argument before anything is queued. Never waits for the device.
  void submit(std::int64_t token, bool write, std::vector<Piece> const& pieces, bool urgent);
  /// Waits up to `timeout_s` for a finished transfer. Nothing on timeout, or when closed and all have been
  /// told.
  std::optional<Finished> next(double timeout_s);
  [[nodiscard]] Stats stats() const;
  /// close() has been called, by whomever, and every transfer has been told.
  [[nodiscard]] bool closed() const;

  /// Waits for the requests in flight; transfers that are not all at the device end with ECANCELED. Then the
  /// files are closed. Calls of next() in other threads return.
  void close();

 private:
  struct State;
  [[nodiscard]] State& state() const;
  std::unique_ptr<State> _state;
};

}  // namespace ds_slide
