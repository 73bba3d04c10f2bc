// io_uring by raw system calls. One ring; the engine thread alone submits to it and reads its completions, so
// the only shared words are the ring's indices, read and written with acquire and release against the kernel.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <stdexcept>

#include "io/backend.hpp"
#include "io/file.hpp"
#include "io/uring_abi.hpp"

namespace ds_slide {
namespace {

constexpr std::uint64_t kWakeTag =
    1;  // user_data of the poll on the eventfd; otherwise it is the Request's address
constexpr unsigned kFileSlots = 256;  // files beyond these are used by descriptor
constexpr unsigned kBufferSlots = 1024;
constexpr std::size_t kBufferBytes = std::size_t{1} << 30;  // the kernel's limit for one registered buffer

int enter(int ring, unsigned submit, unsigned wait, unsigned flags) {
  return static_cast<int>(::syscall(uring::kEnter, ring, submit, wait, flags, nullptr, 0));
}

int set_up(unsigned entries, uring::Params& params) {
  // Without COOP_TASKRUN every completion interrupts the engine thread wherever it is; kernels before 5.19
  // lack it.
  for (std::uint32_t const flags : {uring::kSetupCoopTaskrun, 0u}) {
    params = {};
    params.flags = flags;
    int const ring = static_cast<int>(::syscall(uring::kSetup, entries, &params));
    if (ring >= 0) return ring;
    if (errno != EINVAL) break;
  }
  throw std::runtime_error("io_uring_setup: " + errno_text(errno));
}

/// A part of the ring shared with the kernel, hidden from forked children: they must not touch it.
class Mapping {
 public:
  Mapping(int ring, std::size_t nbytes, long what) : _nbytes(nbytes) {
    _data = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, what);
    if (_data == MAP_FAILED) throw std::runtime_error("mmap of the io_uring: " + errno_text(errno));
    ::madvise(_data, nbytes, MADV_DONTFORK);
  }
  ~Mapping() { ::munmap(_data, _nbytes); }
  Mapping(Mapping const&) = delete;
  Mapping& operator=(Mapping const&) = delete;
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(_data) + offset);
  }

 private:
  void* _data;
  std::size_t _nbytes;
};

struct Descriptor {
  explicit Descriptor(int fd_) : fd(fd_) {}
  ~Descriptor() { ::close(fd); }
  Descriptor(Descriptor const&) = delete;
  Descriptor& operator=(Descriptor const&) = delete;
  int fd;
};

class Uring final : public Backend {
 public:
  explicit Uring(unsigned queue_depth);
  ~Uring() override;
  char const* name() const noexcept override { return "io_uring"; }
  void exchange(std::vector<Request*> const& starting, std::vector<Completion>& finished) override;
  void wake() noexcept override { static_cast<void>(::eventfd_write(_event.fd, 1)); }
  bool register_file(File& file) override;
  bool register_memory(std::uintptr_t address, std::size_t nbytes) override;
  void unregister_memory(std::uintptr_t address) override;

 private:
  struct Buffers {  // one registered range, in slots first_slot, first_slot + 1, ... of at most kBufferBytes
                    // each
    std::size_t nbytes;
    unsigned first_slot;
  };
  uring::Submission& next_submission();
  void prepare(Request& request);
  void poll_event();
  void submit_and_wait(std::vector<Completion>& finished);
  void reap(std::vector<Completion>& finished);
  void check();
  int fixed_buffer(Request const& request);
  bool update_buffers(unsigned first, iovec const* vectors, unsigned count) const;

  uring::Params _params{};
  Descriptor _event;
  Descriptor _ring;
  std::unique_ptr<Mapping> _submission_ring, _completion_ring, _submissions;
  unsigned *_sq_tail, *_sq_array, *_cq_head, *_cq_tail;
  uring::Completion* _completions;
  unsigned _sq_mask, _cq_mask;

  // The engine thread's alone.
  unsigned _pending = 0;  // in the submission ring, not yet taken by the kernel
  bool _polling = false;

  std::mutex _mutex;  // guards what follows
  int _files = -1;    // registered so far; -1 when the kernel takes none
  std::map<std::uintptr_t, Buffers> _buffers;
  std::vector<bool> _used_slots;  // empty when the kernel takes no buffers
};

Uring::Uring(unsigned queue_depth)
    : _event(make_eventfd(true)),
      _ring(set_up(queue_depth + 1, _params)) {  // one more: the poll on the eventfd
  std::size_t sq_bytes = _params.sq.array + _params.sq_entries * sizeof(unsigned);
  std::size_t const cq_bytes = _params.cq.entries + _params.cq_entries * sizeof(uring::Completion);
  bool const single = (_params.features & uring::kFeatureSingleMmap) != 0;
  if (single) sq_bytes = std::max(sq_bytes, cq_bytes);
  _submission_ring = std::make_unique<Mapping>(_ring.fd, sq_bytes, uring::kMapSubmissionRing);
  if (!single) _completion_ring = std::make_unique<Mapping>(_ring.fd, cq_bytes, uring::kMapCompletionRing);
  _submissions = std::make_unique<Mapping>(_ring.fd, _params.sq_entries * sizeof(uring::Submission),
                                           uring::kMapSubmissions);
  Mapping const& sq = *_submission_ring;
  Mapping const& cq = single ? *_submission_ring : *_completion_ring;
  _sq_tail = sq.at<unsigned>(_params.sq.tail);
  _sq_array = sq.at<unsigned>(_params.sq.array);
  _sq_mask = *sq.at<unsigned>(_params.sq.ring_mask);
  _cq_head = cq.at<unsigned>(_params.cq.head);
  _cq_tail = cq.at<unsigned>(_params.cq.tail);
  _cq_mask = *cq.at<unsigned>(_params.cq.ring_mask);
  _completions = cq.at<uring::Completion>(_params.cq.entries);
  for (unsigned i = 0; i < _params.sq_entries; ++i) _sq_array[i] = i;
  check();

  std::vector<std::int32_t> const no_files(kFileSlots, -1);
  if (::syscall(uring::kRegister, _ring.fd, uring::kRegisterFiles, no_files.data(), kFileSlots) == 0)
    _files = 0;
  uring::ResourceTable table{};
  table.count = kBufferSlots;
  table.flags = uring::kSparse;
  if (::syscall(uring::kRegister, _ring.fd, uring::kRegisterBuffers2, &table, sizeof(table)) == 0) {
    _used_slots.assign(kBufferSlots, false);
  }
}

Uring::~Uring() {
  // Kernels before 5.13 let go of a table only when nothing is in flight: end the poll. Not left to close(),
  // which drops files and memory some time later, when a filesystem may be wanted for unmounting.
  std::vector<Completion> none;
  if (_polling) wake();
  while (_polling) exchange({}, none);
  ::syscall(uring::kRegister, _ring.fd, uring::kUnregisterBuffers, nullptr, 0);
  ::syscall(uring::kRegister, _ring.fd, uring::kUnregisterFiles, nullptr, 0);
}

/// One wake-up and one 8-byte read through the ring: proves the two kinds of operation that are needed.
void Uring::check() {
  Descriptor const event(make_eventfd(true));
  std::uint64_t value = 0;
  ::eventfd_write(event.fd, 7);
  Request request;
  uring::Submission& read = next_submission();
  read.opcode = uring::kRead;
  read.fd = event.fd;
  read.address = reinterpret_cast<std::uintptr_t>(&value);
  read.nbytes = sizeof(value);
  read.user_data = reinterpret_cast<std::uintptr_t>(&request);
  std::vector<Completion> finished;
  poll_event();
  wake();
  while (finished.empty() || _polling) {
    submit_and_wait(finished);
    reap(finished);
  }
  if (finished[0].result != sizeof(value) || value != 7) {
    int const error = finished[0].result < 0 ? static_cast<int>(-finished[0].result) : EIO;
    throw std::runtime_error("io_uring does not read: " + errno_text(error));
  }
}

uring::Submission& Uring::next_submission() {
  unsigned const tail = *_sq_tail;
  uring::Submission& entry = _submissions->at<uring::Submission>(0)[tail & _sq_mask];
  entry = {};
  __atomic_store_n(_sq_tail, tail + 1, __ATOMIC_RELEASE);  // the kernel looks only when it is entered
  ++_pending;
  return entry;
}

void Uring::prepare(Request& request) {
  uring::Submission& entry = next_submission();
  int const buffer = fixed_buffer(request);
  if (buffer >= 0) {
    entry.opcode = request.write ? uring::kWriteFixed : uring::kReadFixed;
    entry.buffer = static_cast<std::uint16_t>(buffer);
  } else {
    entry.opcode = request.write ? uring::kWrite : uring::kRead;
  }
  entry.fd = request.file->fd();
  if (request.file->slot >= 0) {
    entry.fd = request.file->slot;
    entry.flags = uring::kFixedFile;
  }
  entry.offset = static_cast<std::uint64_t>(request.offset);
  entry.address = reinterpret_cast<std::uintptr_t>(request.address);
  entry.nbytes = request.nbytes;
  entry.user_data = reinterpret_cast<std::uintptr_t>(&request);
}

void Uring::poll_event() {
  uring::Submission& entry = next_submission();
  entry.opcode = uring::kPollAdd;
  entry.fd = _event.fd;
  entry.operation_flags = POLLIN;
  entry.user_data = kWakeTag;
  _polling = true;
}

void Uring::exchange(std::vector<Request*> const& starting, std::vector<Completion>& finished) {
  for (Request* request : starting) prepare(*request);
  if (!_polling) poll_event();
  submit_and_wait(finished);
  reap(finished);
}

void Uring::submit_and_wait(std::vector<Completion>& finished) {
  for (;;) {
    int const taken = enter(_ring.fd, _pending, 1, uring::kEnterGetEvents);
    if (taken > 0) _pending -= static_cast<unsigned>(taken);
    if (taken >= 0 && _pending == 0) return;
    // The kernel stops at an entry that it finds invalid (its completion says so) and then does not wait.
    if (taken > 0 || (taken < 0 && errno == EINTR)) continue;
    if (taken == 0 || errno == EAGAIN || errno == EBUSY || _pending == 0) {
      // Out of kernel memory, or completions to be read first: wait for one of them, then try again. Perhaps
      // nothing is in flight that could end the wait, hence the limit in time.
      pollfd ready{_ring.fd, POLLIN, 0};
      ::poll(&ready, 1, 10);
      return;
    }
    // The kernel took none of them: they end with the reason. The ring goes back to where the kernel stands.
    int const error = errno;
    unsigned tail = *_sq_tail;
    for (; _pending > 0; --_pending) {
      std::uint64_t const tag = _submissions->at<uring::Submission>(0)[--tail & _sq_mask].user_data;
      if (tag == kWakeTag) {
        _polling = false;
      } else {
        finished.push_back({reinterpret_cast<Request*>(tag), -error});
      }
    }
    __atomic_store_n(_sq_tail, tail, __ATOMIC_RELEASE);
    return;
  }
}

void Uring::reap(std::vector<Completion>& finished) {
  unsigned head = *_cq_head;
  unsigned const tail = __atomic_load_n(_cq_tail, __ATOMIC_ACQUIRE);
  for (; head != tail; ++head) {
    uring::Completion const& entry = _completions[head & _cq_mask];
    if (entry.user_data == kWakeTag) {
      eventfd_t count;
      static_cast<void>(::eventfd_read(_event.fd, &count));
      _polling = false;
    } else {
      finished.push_back({reinterpret_cast<Request*>(entry.user_data), entry.result});
    }
  }
  __atomic_store_n(_cq_head, head, __ATOMIC_RELEASE);
}

bool Uring::register_file(File& file) {
  std::lock_guard<std::mutex> lock(_mutex);
  if (_files < 0 || _files >= static_cast<int>(kFileSlots)) return false;
  std::int32_t fd = file.fd();
  uring::FilesUpdate update{static_cast<std::uint32_t>(_files), 0, reinterpret_cast<std::uintptr_t>(&fd)};
  if (::syscall(uring::kRegister, _ring.fd, uring::kUpdateFiles, &update, 1) != 1) return false;
  file.slot = _files++;
  return true;
}

bool Uring::update_buffers(unsigned first, iovec const* vectors, unsigned count) const {
  uring::ResourceUpdate update{};
  update.first = first;
  update.data = reinterpret_cast<std::uintptr_t>(vectors);
  update.count = count;
  return ::syscall(uring::kRegister, _ring.fd, uring::kUpdateBuffers, &update, sizeof(update)) ==
         static_cast<long>(count);
}

bool Uring::register_memory(std::uintptr_t address, std::size_t nbytes) {
  auto const count = static_cast<unsigned>((nbytes + kBufferBytes - 1) / kBufferBytes);
  unsigned first = 0;
  {
    std::lock_guard<std::mutex> lock(_mutex);
    auto const free_run = std::search_n(_used_slots.begin(), _used_slots.end(), count, false);
    if (count == 0 || free_run == _used_slots.end()) return false;
    first = static_cast<unsigned>(free_run - _used_slots.begin());
    std::fill_n(free_run, count, true);
  }
  std::vector<iovec> vectors(count);
  for (unsigned i = 0; i < count; ++i) {
    std::size_t const begin = i * kBufferBytes;
    vectors[i] = {reinterpret_cast<void*>(address + begin), std::min(kBufferBytes, nbytes - begin)};
  }
  // Not under the mutex: locking the pages of 4 GiB takes a second, during which requests go on.
  bool const registered = update_buffers(first, vectors.data(), count);
  if (!registered) {  // RLIMIT_MEMLOCK, usually; the first ones may have been taken
    std::vector<iovec> const nothing(count, iovec{nullptr, 0});
    update_buffers(first, nothing.data(), count);
  }
  std::lock_guard<std::mutex> lock(_mutex);
  if (registered) {
    _buffers[address] = {nbytes, first};
  } else {
    std::fill_n(_used_slots.begin() + first, count, false);
  }
  return registered;
}

void Uring::unregister_memory(std::uintptr_t address) {
  std::lock_guard<std::mutex> lock(_mutex);
  auto const found = _buffers.find(address);
  if (found == _buffers.end()) return;
  auto const count = static_cast<unsigned>((found->second.nbytes + kBufferBytes - 1) / kBufferBytes);
  std::vector<iovec> const nothing(count, iovec{nullptr, 0});
  update_buffers(found->second.first_slot, nothing.data(), count);
  std::fill_n(_used_slots.begin() + found->second.first_slot, count, false);
  _buffers.erase(found);
}

/// Slot of the registered buffer that holds all of the request's memory, -1 if there is none.
int Uring::fixed_buffer(Request const& request) {
  auto const address = reinterpret_cast<std::uintptr_t>(request.address);
  std::lock_guard<std::mutex> lock(_mutex);
  auto after = _buffers.upper_bound(address);
  if (after == _buffers.begin()) return -1;
  auto const& [begin, buffers] = *--after;
  std::size_t const first = address - begin;
  std::size_t const last = first + request.nbytes - 1;
  if (last >= buffers.nbytes || first / kBufferBytes != last / kBufferBytes) return -1;
  return static_cast<int>(buffers.first_slot + first / kBufferBytes);
}

}  // namespace

std::unique_ptr<Backend> make_uring(unsigned queue_depth) { return std::make_unique<Uring>(queue_depth); }

}  // namespace ds_slide
