// The kernel's older asynchronous I/O, by raw system calls (what the library libaio wraps). Asynchronous for
// O_DIRECT only: on a buffered file io_submit itself does the work, in the engine thread, one request after
// the other.
#include <linux/aio_abi.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <deque>
#include <stdexcept>

#include "io/backend.hpp"
#include "io/file.hpp"

namespace ds_slide {
namespace {

class Libaio final : public Backend {
 public:
  explicit Libaio(unsigned queue_depth)
      : _event(make_eventfd(false)), _events(queue_depth), _blocks(queue_depth) {
    if (::syscall(SYS_io_setup, queue_depth, &_context) != 0) {
      int const error = errno;
      ::close(_event);
      throw std::runtime_error("io_setup: " + errno_text(error) +
                               (error == EAGAIN ? ", raise /proc/sys/fs/aio-max-nr" : ""));
    }
    for (iocb& block : _blocks) _free.push_back(&block);
  }
  ~Libaio() override {
    ::syscall(SYS_io_destroy, _context);
    ::close(_event);
  }
  char const* name() const noexcept override { return "libaio"; }

  void exchange(std::vector<Request*> const& starting, std::vector<Completion>& finished) override {
    for (Request* request : starting) _unsubmitted.push_back(prepare(*request));
    submit(finished);
    if (!finished.empty()) return;
    // Completions and wake() both add to the eventfd, so this one sleep sees both. It is read before the
    // events are fetched: an event that arrives in between makes the next read return at once.
    eventfd_t count;
    while (::eventfd_read(_event, &count) != 0 && errno == EINTR) {
    }
    timespec at_once{};
    long const fetched = ::syscall(SYS_io_getevents, _context, 0L, static_cast<long>(_events.size()),
                                   _events.data(), &at_once);
    for (long i = 0; i < fetched; ++i) {  // a failure (EINTR) fetches none: see below
      io_event const& event = _events[static_cast<std::size_t>(i)];
      finish(reinterpret_cast<iocb*>(event.obj), event.res, finished);
    }
    // The eventfd was emptied above, what is left to fetch must not wait for another completion.
    if (fetched < 0) wake();
  }

  void wake() noexcept override { static_cast<void>(::eventfd_write(_event, 1)); }

 private:
  iocb* prepare(Request& request) {
    iocb* const block = _free.back();
    _free.pop_back();
    *block = {};
    block->aio_data = reinterpret_cast<std::uintptr_t>(&request);
    block->aio_lio_opcode = request.write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    block->aio_fildes = static_cast<std::uint32_t>(request.file->fd());
    block->aio_buf = reinterpret_cast<std::uintptr_t>(request.address);
    block->aio_nbytes = request.nbytes;
    block->aio_offset = request.offset;
    block->aio_flags = IOCB_FLAG_RESFD;
    block->aio_resfd = static_cast<std::uint32_t>(_event);
    return block;
  }

  void submit(std::vector<Completion>& finished) {
    while (!_unsubmitted.empty()) {
      _batch.assign(_unsubmitted.begin(), _unsubmitted.end());
      long const taken = ::syscall(SYS_io_submit, _context, static_cast<long>(_batch.size()), _batch.data());
      if (taken > 0) {
        _unsubmitted.erase(_unsubmitted.begin(), _unsubmitted.begin() + taken);
        _in_flight += static_cast<unsigned>(taken);
        continue;
      }
      int const error = taken < 0 ? errno : EAGAIN;
      if (error == EINTR) continue;
      if (error == EAGAIN && _in_flight > 0) return;  // the kernel is out of room: after the next completion
      ++_in_flight;  // the reason is that of the first one; the others may be good
      finish(_unsubmitted.front(), -error, finished);
      _unsubmitted.pop_front();
    }
  }

  void finish(iocb* block, std::int64_t result, std::vector<Completion>& finished) {
    --_in_flight;
    finished.push_back({reinterpret_cast<Request*>(block->aio_data), result});
    _free.push_back(block);
  }

  aio_context_t _context = 0;
  int _event;
  // The engine thread's alone.
  std::vector<io_event> _events;
  std::vector<iocb> _blocks;
  std::vector<iocb*> _free, _batch;
  std::deque<iocb*> _unsubmitted;
  unsigned _in_flight = 0;
};

}  // namespace

std::unique_ptr<Backend> make_libaio(unsigned queue_depth) { return std::make_unique<Libaio>(queue_depth); }

}  // namespace ds_slide
