#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ds_slide {
namespace {  // one copy per instruction set, see update/kernels.hpp

/// Puts this thread into IEEE mode: round to nearest even, subnormals kept, no traps.
inline void reset_float_mode() noexcept {
#if defined(__x86_64__)
  _mm_setcsr(0x1F80);
#endif
}

#if defined(__x86_64__)
/// While it lives, this thread treats subnormal operands as zero and flushes subnormal results (DAZ, FTZ).
class FlushSubnormals {
 public:
  FlushSubnormals() noexcept : _saved(_mm_getcsr()) { _mm_setcsr(0x1F80 | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(_saved); }
  FlushSubnormals(FlushSubnormals const&) = delete;
  FlushSubnormals& operator=(FlushSubnormals const&) = delete;

 private:
  unsigned _saved;
};
#endif

}  // namespace
}  // namespace ds_slide
