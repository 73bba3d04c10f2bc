#pragma once

#include <sys/types.h>

#include <cstddef>

namespace ds_slide {

/// One mapping of exactly the size asked for, rounded up to pages, optionally page-locked: of zero-filled
/// memory of its own, or of a part of a memory file that other processes map too.
///
/// Why not torch's pinned allocator: it rounds every block up to a power of two (1.7 times the states of a 3
/// B model), and the pages must also be aligned for O_DIRECT.
///
/// The mapping is not inherited by fork: a copy-on-write image of the states in every data-loader child would
/// make each update of the parent copy pages, up to twice the memory, and move them away from the GPU's
/// pinned view.
class Slab {
 public:
  /// Throws std::runtime_error with the bytes, the cause and what to do. `huge_pages` asks for transparent
  /// huge pages (a hint: the kernel may not have them).
  Slab(std::size_t nbytes, bool pin, bool huge_pages);

  /// [offset, offset + nbytes) of the memory file `descriptor`, which must be that long; `offset` is a
  /// multiple of the page size. What is written is seen by all who map it. The descriptor may be closed
  /// afterwards. Throws as above, and std::invalid_argument for a part that the file does not have.
  Slab(int descriptor, std::size_t offset, std::size_t nbytes, bool pin, bool huge_pages);
  ~Slab() { close(); }
  Slab(Slab const&) = delete;
  Slab& operator=(Slab const&) = delete;

  /// Unlocks and unmaps. Whatever still views the memory must not be used again. A second call does nothing.
  void close() noexcept;

  [[nodiscard]] void* data() const noexcept { return _data; }  // nullptr when closed or of 0 bytes
  [[nodiscard]] std::size_t nbytes() const noexcept { return _nbytes; }
  [[nodiscard]] bool pinned() const noexcept { return _pinned; }

 private:
  void adopt(bool pin, bool huge_pages);

  void* _data = nullptr;
  std::size_t _nbytes = 0;
  std::size_t _mapped = 0;
  bool _pinned = false;
  void* _context = nullptr;
  pid_t _owner = 0;
};

}  // namespace ds_slide
