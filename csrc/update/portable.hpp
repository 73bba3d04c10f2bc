// One element at a time in standard C++: the path of every machine without AVX2, the tail of the vector
// paths, and the plain statement of the arithmetic that they must match bit by bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "update/types.hpp"

namespace ds_slide {
namespace {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline bool is_nan_bits(std::uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

inline float fp16_to_float(std::uint16_t half) {
  std::uint32_t const sign = (half & 0x8000u) << 16;
  std::uint32_t const rest = half & 0x7FFFu;
  if (rest >= 0x7C00u) {  // infinity or NaN; a NaN comes out quiet, as from vcvtph2ps
    std::uint32_t const mantissa = (rest & 0x03FFu) << 13;
    return float_of(sign | 0x7F800000u | mantissa | (mantissa != 0 ? 0x00400000u : 0u));
  }
  if (rest < 0x0400u)
    return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));  // subnormal: exact
  return float_of(sign | ((rest << 13) + 0x38000000u));
}

inline std::uint16_t float_to_fp16(float value) {
  std::uint32_t const bits = bits_of(value);
  std::uint32_t const sign = (bits >> 16) & 0x8000u;
  std::uint32_t const rest = bits & 0x7FFFFFFFu;
  std::uint32_t half;
  if (rest > 0x7F800000u) {
    half = 0x7E00u | ((rest >> 13) & 0x03FFu);
  } else if (rest >= 0x477FF000u) {  // 65520 and more round to infinity
    half = 0x7C00u;
  } else if (rest >= 0x38800000u) {  // normal in fp16: rebias, round the 13 lost bits to nearest even
    half = (rest - 0x38000000u + 0x0FFFu + ((rest >> 13) & 1u)) >> 13;
  } else {  // subnormal in fp16 or zero: adding 0.5 leaves the rounded multiple of 2^-24 in the low mantissa
            // bits
    float const shifted = float_of(rest) + 0.5f;
    half = bits_of(shifted) - 0x3F000000u;
  }
  return static_cast<std::uint16_t>(sign | half);
}

inline std::uint16_t float_to_bf16(float value) {
  std::uint32_t const bits = bits_of(value);
  std::uint32_t const rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  std::uint32_t const quiet = (bits >> 16) | 0x0040u;
  return static_cast<std::uint16_t>(is_nan_bits(bits) ? quiet : rounded);
}

// The three below are written without branches, on integers: compilers then vectorise the loops around them.

/// bits, or the bits of a zero with the same sign.
inline float zero_if(bool zero, std::uint32_t bits) {
  return float_of(bits & (0x80000000u | (static_cast<std::uint32_t>(zero) - 1u)));
}

/// value, or a zero of its sign when it is subnormal.
inline float flush(float value) {
  std::uint32_t const bits = bits_of(value);
  return zero_if((bits & 0x7FFFFFFFu) < 0x00800000u, bits);
}

/// The result of an operation that may round a tiny value up to the least normal number 2^-126. The
/// processor's flush-to-zero mode looks at the value rounded as if exponents had no lower end; `scaled`, the
/// same operation on an operand 2^64 times larger, shows that value.
inline float flush_result(float result, float scaled) {
  std::uint32_t const bits = bits_of(result);
  bool const small = (bits & 0x7FFFFFFFu) <= 0x00800000u;
  bool const tiny = (bits_of(scaled) & 0x7FFFFFFFu) < 0x20800000u;
  return zero_if(small & tiny, bits);
}

struct Portable {
  using Float = float;
  static constexpr std::size_t width = 1;
  static constexpr std::size_t prefetch_distance =
      0;                     // a prefetch in the loop would keep it from being vectorised
  struct ArithmeticMode {};  // IEEE mode; the operations below flush

  static float set(float value) { return value; }
  static float operand(float value) { return flush(value); }
  static float mul(float a, float b) { return flush_result(a * b, (a * 0x1p64f) * b); }
  static float div(float a, float b) { return flush_result(a / b, (a * 0x1p64f) / b); }
  static float add(float a, float b) { return flush(a + b); }  // a subnormal sum is exact
  static float sub(float a, float b) { return flush(a - b); }
  static float sqrt(float a) { return __builtin_sqrtf(a); }
  static float add_ieee(float a, float b) { return a + b; }

  static float load_fp32(float const* p) { return *p; }
  static float load_bf16(std::uint16_t const* p) { return float_of(static_cast<std::uint32_t>(*p) << 16); }
  static float load_fp16(std::uint16_t const* p) { return fp16_to_float(*p); }
  template <bool streams = false>
  static void store_fp32(float* p, float value) {
    *p = value;
  }
  static void store_bf16(std::uint16_t* p, float value) { *p = float_to_bf16(value); }
  template <bool streams = false>
  static void store_fp16(std::uint16_t* p, float value) {
    *p = float_to_fp16(value);
  }

  static float load_split(std::uint16_t const* hi, std::uint16_t const* lo) {
    std::uint32_t const remainder = static_cast<std::uint32_t>(static_cast<std::int16_t>(*lo));
    return float_of((static_cast<std::uint32_t>(*hi) << 16) + remainder);
  }
  /// hi: value rounded to bf16, half up (ties away from zero), so that the low half of value's bits, read as
  /// a signed number, is what hi lacks of it: load_split gives every value back. Rounding half to even would
  /// give two values (low half 0x8000, one rounded up and one down) the same hi and lo. A NaN is made quiet.
  template <bool streams = false>
  static void store_split(std::uint16_t* hi, std::uint16_t* lo, float value) {
    std::uint32_t const bits = bits_of(value);
    std::uint32_t const rounded = (bits + 0x8000u) >> 16;
    std::uint32_t const quiet = (bits >> 16) | 0x0040u;
    *hi = static_cast<std::uint16_t>(is_nan_bits(bits) ? quiet : rounded);
    *lo = static_cast<std::uint16_t>(is_nan_bits(bits) ? 0u : bits);
  }

  // 32-bit integers that wrap around; comparisons take them as signed.
  using Int = std::uint32_t;
  using Mask = bool;
  static Int set_int(std::uint32_t value) { return value; }
  static Int lane_numbers() { return 0; }
  static Int bits(float value) { return bits_of(value); }
  static float floats(Int value) { return float_of(value); }
  static float to_float(Int a) { return static_cast<float>(static_cast<std::int32_t>(a)); }
  static Int add_int(Int a, Int b) { return a + b; }
  static Int sub_int(Int a, Int b) { return a - b; }
  static Int mul_int(Int a, Int b) { return a * b; }
  static Int and_int(Int a, Int b) { return a & b; }
  static Int or_int(Int a, Int b) { return a | b; }
  static Int xor_int(Int a, Int b) { return a ^ b; }
  static Int min_int(Int a, Int b) {
    return static_cast<std::int32_t>(a) < static_cast<std::int32_t>(b) ? a : b;
  }
  static Int max_int(Int a, Int b) {
    return static_cast<std::int32_t>(a) < static_cast<std::int32_t>(b) ? b : a;
  }
  static std::uint32_t greatest_lane(Int a) { return a; }
  template <int count>
  static Int shift_left(Int a) {
    return a << count;
  }
  template <int count>
  static Int shift_right(Int a) {
    return a >> count;
  }
  static bool any(Int a) { return a != 0; }
  static void store_int(std::uint32_t* p, Int a) { *p = a; }
  static Mask is_positive(Int a) { return static_cast<std::int32_t>(a) > 0; }
  static Mask less(float a, float b) { return a < b; }
  static Int keep_if(Mask mask, Int a) { return a & (0u - static_cast<std::uint32_t>(mask)); }
  static Int load8(std::uint8_t const* p) { return *p; }
  static void store8(std::uint8_t* p, Int value) { *p = static_cast<std::uint8_t>(value); }
  /// Up with the probability that the lost 16 bits are of a unit in the last place; `random` is below 2^16.
  static void store_bf16_stochastic(std::uint16_t* p, float value, Int random) {
    std::uint32_t const bits = bits_of(value);
    std::uint32_t const quiet = (bits >> 16) | 0x0040u;
    *p = static_cast<std::uint16_t>(is_nan_bits(bits) ? quiet : (bits + random) >> 16);
  }

  template <std::size_t lanes>
  struct SquareLanes {
    double sums[lanes] = {};
    void add(std::size_t lane, float value) {
      sums[lane] += static_cast<double>(value) * static_cast<double>(value);
    }
    void store(double* out) const { std::memcpy(out, sums, sizeof(sums)); }
  };
};

}  // namespace
}  // namespace ds_slide
