// Copies to memory that is not read soon: stores that go past the caches, so that the target is not read
// before it is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ds_slide {
namespace {

/// `end_streams` follows before the target is handed over.
inline void stream_copy(void* to, void const* from, std::size_t bytes) {
#if defined(__x86_64__)
  constexpr std::size_t kVector = 16, kLine = 64;
  auto* out = static_cast<char*>(to);
  auto const* in = static_cast<char const*>(from);
  std::size_t head = (kVector - reinterpret_cast<std::uintptr_t>(out) % kVector) % kVector;
  if (head > bytes) head = bytes;
  std::memcpy(out, in, head);
  std::size_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    for (std::size_t k = 0; k < kLine; k += kVector) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i + k),
                       _mm_loadu_si128(reinterpret_cast<__m128i const*>(in + i + k)));
    }
  }
  std::memcpy(out + i, in + i, bytes - i);
#else
  std::memcpy(to, from, bytes);
#endif
}

/// Hand-overs are by atomics, which do not order streaming stores.
inline void end_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace ds_slide
