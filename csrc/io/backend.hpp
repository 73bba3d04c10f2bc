#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ds_slide {

class File;
struct Transfer;

/// One read or write as the device sees it. The engine thread makes it and owns it, except between
/// Backend::exchange taking it and returning it in a Completion: then the kernel (or a thread of the backend)
/// uses it.
struct Request {
  Transfer* transfer = nullptr;
  File* file = nullptr;
  bool write = false;
  std::int64_t offset = 0;  // of the part that is still to be done, as are the next two
  char* address = nullptr;
  std::uint32_t nbytes = 0;
  std::uint32_t total = 0;     // bytes when it was cut
  std::uint32_t attempts = 0;  // since it last made progress
  std::chrono::steady_clock::time_point started_at{};
};

/// What became of a request: bytes moved, which may be fewer than asked for, or -errno.
struct Completion {
  Request* request = nullptr;
  std::int64_t result = 0;
};

/// A way to have many requests in flight. Knows nothing of transfers, order or retries.
///
/// exchange() is for one thread, the engine's; everything else may be called from any thread.
class Backend {
 public:
  Backend() = default;
  virtual ~Backend() = default;
  Backend(Backend const&) = delete;
  Backend& operator=(Backend const&) = delete;

  [[nodiscard]] virtual char const* name() const noexcept = 0;

  /// Hands `starting` to the device, sleeps until a request has finished or wake() was called, and appends
  /// the finished requests. May return early with nothing. A request that cannot be started counts as
  /// finished with -errno.
  virtual void exchange(std::vector<Request*> const& starting, std::vector<Completion>& finished) = 0;

  /// Ends the current call of exchange(), or the next one if none is running.
  virtual void wake() noexcept = 0;

  /// Tells the device of a file or of memory that it will see often; false when that is not possible. The
  /// memory must stay mapped until it is unregistered or the backend is destroyed.
  virtual bool register_file(File& file) { return static_cast<void>(file), false; }
  virtual bool register_memory(std::uintptr_t address, std::size_t nbytes) {
    return static_cast<void>(address), static_cast<void>(nbytes), false;
  }
  virtual void unregister_memory(std::uintptr_t address) { static_cast<void>(address); }
};

// Each throws std::runtime_error with the errno text when the system does not let it work. All are tried by
// use, never by version: containers forbid io_uring, kernels are built without libaio.
std::unique_ptr<Backend> make_uring(unsigned queue_depth);
std::unique_ptr<Backend> make_libaio(unsigned queue_depth);
std::unique_ptr<Backend> make_threads(unsigned queue_depth);

/// `name` as above or "auto", which takes the first that works; `skipped` then says which did not and why.
std::unique_ptr<Backend> make_backend(std::string const& name, unsigned queue_depth, std::string& skipped);

/// "Input/output error (errno 5)".
std::string errno_text(int error);

/// An eventfd that wakes a thread in a kernel wait. Throws std::runtime_error.
int make_eventfd(bool nonblocking);

}  // namespace ds_slide
