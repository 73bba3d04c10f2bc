#include "io/backend.hpp"

#include <sys/eventfd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace ds_slide {
namespace {

struct Kind {
  char const* name;
  std::unique_ptr<Backend> (*make)(unsigned);
};
constexpr Kind kKinds[] = {{"io_uring", make_uring}, {"libaio", make_libaio}, {"threads", make_threads}};

}  // namespace

std::string errno_text(int error) {
  return std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
}

int make_eventfd(bool nonblocking) {
  int const fd = ::eventfd(0, EFD_CLOEXEC | (nonblocking ? EFD_NONBLOCK : 0));
  if (fd < 0) throw std::runtime_error("eventfd: " + errno_text(errno));
  return fd;
}

std::unique_ptr<Backend> make_backend(std::string const& name, unsigned queue_depth, std::string& skipped) {
  bool known = name == "auto";
  for (Kind const& kind : kKinds) {
    if (name != "auto" && name != kind.name) continue;
    known = true;
    try {
      return kind.make(queue_depth);
    } catch (std::runtime_error const& error) {
      skipped += std::string(skipped.empty() ? "" : "; ") + kind.name + ": " + error.what();
    }
  }
  if (!known) {
    throw std::invalid_argument("backend is \"" + name +
                                "\" but must be one of auto, io_uring, libaio, threads");
  }
  throw std::runtime_error("the I/O backend \"" + name + "\" cannot be used here (" + skipped +
                           "); choose another one, or \"auto\" for the first that works");
}

}  // namespace ds_slide
