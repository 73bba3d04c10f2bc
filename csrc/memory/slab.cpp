#include "memory/slab.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "memory/cuda_driver.hpp"

namespace ds_slide {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t page_size() {
  static std::size_t const size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

/// `length` bytes (a multiple of the page size) at a multiple of `alignment`, nullptr when there is no room.
void* map_aligned(std::size_t length, std::size_t alignment) {
  std::size_t const slack = alignment > page_size() ? alignment : 0;
  void* const raw = mmap(nullptr, length + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  if (slack == 0) return raw;
  auto const start = reinterpret_cast<std::uintptr_t>(raw);
  std::uintptr_t const aligned = (start + alignment - 1) / alignment * alignment;
  std::size_t const head = aligned - start;
  if (head > 0) munmap(raw, head);
  if (slack > head) munmap(reinterpret_cast<void*>(aligned + length), slack - head);
  return reinterpret_cast<void*>(aligned);
}

}  // namespace

Slab::Slab(std::size_t nbytes, bool pin, bool huge_pages) : _nbytes(nbytes), _owner(getpid()) {
  if (nbytes == 0) return;
  bool const fits = nbytes <= std::numeric_limits<std::size_t>::max() / 2;
  _mapped = fits ? (nbytes + page_size() - 1) / page_size() * page_size() : 0;
  _data = fits ? map_aligned(_mapped, huge_pages ? kHugePage : page_size()) : nullptr;
  if (_data == nullptr) {
    throw std::runtime_error("cannot map " + std::to_string(nbytes) + " bytes of host memory (" +
                             std::strerror(fits ? errno : ENOMEM) +
                             "); lower the host memory budget or raise `ulimit -v`");
  }
  adopt(pin, huge_pages);
}

Slab::Slab(int descriptor, std::size_t offset, std::size_t nbytes, bool pin, bool huge_pages)
    : _nbytes(nbytes), _owner(getpid()) {
  if (nbytes == 0) return;
  struct stat file{};
  if (fstat(descriptor, &file) != 0) {
    throw std::runtime_error(std::string("cannot map shared host memory: ") + std::strerror(errno));
  }
  auto const length = static_cast<std::size_t>(file.st_size);
  // Beyond the end of the file a touch would end the process with SIGBUS.
  if (offset % page_size() != 0 || offset > length || nbytes > length - offset) {
    throw std::invalid_argument("a memory file of " + std::to_string(length) + " bytes has no " +
                                std::to_string(nbytes) + " bytes from " + std::to_string(offset) +
                                ", or they begin within a page");
  }
  _mapped = (nbytes + page_size() - 1) / page_size() * page_size();
  void* const raw =
      mmap(nullptr, _mapped, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, static_cast<off_t>(offset));
  if (raw == MAP_FAILED) {
    throw std::runtime_error("cannot map " + std::to_string(nbytes) + " bytes of shared host memory (" +
                             std::strerror(errno) + "); raise `ulimit -v`");
  }
  _data = raw;
  adopt(pin, huge_pages);
}

void Slab::adopt(bool pin, bool huge_pages) {
  if (huge_pages) madvise(_data, _mapped, MADV_HUGEPAGE);
  madvise(_data, _mapped, MADV_DONTFORK);
  if (!pin) return;
  try {
    _context = cuda_driver::register_host(_data, _mapped);
    _pinned = true;
  } catch (...) {
    close();
    throw;
  }
}

void Slab::close() noexcept {
  // A forked child has neither the mapping nor a usable driver. The memory at that address there has another
  // owner.
  if (_data != nullptr && _owner == getpid()) {
    if (_pinned) cuda_driver::unregister_host(_data, _context);
    munmap(_data, _mapped);
  }
  _data = nullptr;
  _pinned = false;
}

}  // namespace ds_slide
