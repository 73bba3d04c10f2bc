#include "io/transfer.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/backend.hpp"
#include "io/file.hpp"

namespace ds_slide {
namespace {

// A request is sent again at most so often without a byte of progress. One interruption follows another only
// by chance; a device that answers the same a thousand times is broken and must not keep a core busy for
// ever.
constexpr std::uint32_t kMaxAttempts = 1000;

Verdict failed(Request const& request, int error, std::string const& reason) {
  std::string sentence = std::string(request.write ? "write of " : "read of ") +
                         std::to_string(request.nbytes) + " bytes at offset " +
                         std::to_string(request.offset) + " of " + request.file->path() +
                         " failed: " + reason;
  return {Outcome::failed, error, std::move(sentence)};
}

}  // namespace

void Transfer::fail(int reason, std::string sentence) {
  piece = pieces.size();
  if (error != 0) return;
  error = reason;
  message = std::move(sentence);
}

void TransferQueue::cut(Request& request, std::uint32_t max_bytes) {
  Transfer& transfer = *_transfers.front();
  Transfer::Piece const& piece = transfer.pieces[transfer.piece];
  std::int64_t const nbytes = std::min<std::int64_t>(piece.nbytes - transfer.cut_bytes, max_bytes);
  request.transfer = &transfer;
  request.file = piece.file;
  request.write = transfer.write;
  request.offset = piece.offset + transfer.cut_bytes;
  request.address = piece.address + transfer.cut_bytes;
  request.nbytes = request.total = static_cast<std::uint32_t>(nbytes);
  request.attempts = 0;
  ++transfer.in_flight;
  transfer.cut_bytes += nbytes;
  if (transfer.cut_bytes < piece.nbytes) return;
  transfer.cut_bytes = 0;
  ++transfer.piece;
  if (transfer.all_started()) _transfers.pop_front();
}

void TransferQueue::remove(Transfer& transfer) {
  _transfers.erase(std::remove(_transfers.begin(), _transfers.end(), &transfer), _transfers.end());
}

Transfer* TransferQueue::pop() {
  if (_transfers.empty()) return nullptr;
  Transfer* const transfer = _transfers.front();
  _transfers.pop_front();
  return transfer;
}

Verdict judge(Request& request, std::int64_t result) {
  if (result == request.nbytes) return {};
  bool const interrupted = result == -EINTR || result == -EAGAIN;
  if (result < 0 && !interrupted) {
    int const error = static_cast<int>(-result);
    return failed(request, error, errno_text(error));
  }
  std::int64_t const moved = std::max<std::int64_t>(result, 0);
  if (moved > request.nbytes) return failed(request, EIO, "more bytes were moved than asked for");
  if (!interrupted && !request.write) {
    try {
      std::int64_t const size = request.file->size();
      if (request.offset + moved >= size) {
        return failed(request, ENODATA, "the file ends at byte " + std::to_string(size));
      }
    } catch (FileError const& error) {
      return failed(request, error.error, error.what());
    }
  }
  // With O_DIRECT the rest must start at a block again, the part of a block is moved twice.
  auto const kept = static_cast<std::uint32_t>(request.file->direct() ? moved / kBlock * kBlock : moved);
  request.offset += kept;
  request.address += kept;
  request.nbytes -= kept;
  request.attempts = kept > 0 ? 0 : request.attempts + 1;
  if (request.attempts < kMaxAttempts) return {Outcome::repeat, 0, {}};
  int const error = interrupted ? static_cast<int>(-result) : EIO;
  return failed(request, error,
                errno_text(error) + ", " + std::to_string(kMaxAttempts) + " times without moving a byte");
}

}  // namespace ds_slide
