#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ds_slide {

/// What this processor and its operating system can do, by the processor's own instruction.
///
/// Not by __builtin_cpu_supports: linked with the clang of ziglang 0.17 it answers no to everything, and the
/// portable kernels, which are several times slower, would run without a word.
struct Processor {
  bool sse42 = false, avx2 = false, avx512 = false;  // avx2 with f16c; avx512 with f, bw, dq and vl

  Processor() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0) return;
    sse42 = has(c, 20);
    bool const f16c = has(c, 29);
    if (!has(c, 27)) return;  // OSXSAVE: the operating system says which registers it saves
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return;
    avx2 = (low & 0x06u) == 0x06u && has(b, 5) && f16c;
    avx512 = avx2 && (low & 0xE6u) == 0xE6u && has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);
#endif
  }

 private:
  static bool has(unsigned bits, int number) { return (bits >> number & 1u) != 0; }
};

}  // namespace ds_slide
