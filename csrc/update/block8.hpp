// Eight-bit codes of a group of 64 moments, relative to the largest magnitude of the group.
//
// The code is a small floating-point number: magnitude code c stands for scale * u. The bits of the fp32
// number u are the bits of 1.0 minus (top - c) << 20: eight levels for each binade, evenly spaced within it,
// and the largest magnitude (c = top) is exact. Code 0 is zero. So coding is a multiplication, integer
// additions and shifts, and a decoded number encodes to the same code.
//
// exp_avg_sq has top 255, the least level is 31.75 binades below the scale. exp_avg has a sign bit and top
// 127: 15.75 binades. That is by design half of them, since the square root of exp_avg_sq divides exp_avg:
// the least nonzero exp_avg over the root of the least nonzero exp_avg_sq is 1.12 times the quotient of the
// largest ones, so rounding up out of the underflow of one never meets the underflow of the other and makes
// no long step.
#pragma once

#include <cstddef>
#include <cstdint>

#include "update/portable.hpp"
#include "update/types.hpp"

namespace ds_slide {
namespace {

template <bool is_signed>
struct Block8 {
  static constexpr std::uint32_t top = is_signed ? 127 : 255;
  static constexpr int step_bits = 20;
  static constexpr std::uint32_t one = 127u << 23;  // bits of 1.0
  static constexpr std::uint32_t zero_code = one - (top << step_bits);
  static constexpr float least_level = is_signed ? 0x1.4p-16f : 0x1.4p-32f;  // code 1
  // With a smaller scale the least level would be below the least normal number 2^-126, which is zero in this
  // arithmetic: the scale is then this one, and the group's largest magnitude is rounded like the others.
  static constexpr std::uint32_t least_scale = (is_signed ? 127u - 110u : 127u - 94u) << 23;  // 2^-110, 2^-94
  // From 2^126 on the reciprocal of the scale would be subnormal.
  static constexpr std::uint32_t overflow = (127u + 126u) << 23;
  static constexpr std::uint32_t nan = 0x7FC00000u;

  /// The fp32 numbers of V::width codes.
  template <class V>
  static inline typename V::Float decode(std::uint8_t const* codes, typename V::Float scale) {
    auto const code = V::load8(codes);
    auto const zero = V::set_int(zero_code);
    if constexpr (is_signed) {
      auto const sign = V::and_int(V::template shift_left<24>(code), V::set_int(0x80000000u));
      auto const magnitude = V::and_int(code, V::set_int(top));
      auto const level = V::add_int(V::template shift_left<step_bits>(magnitude), zero);
      return V::mul(V::floats(V::keep_if(V::is_positive(magnitude), V::or_int(level, sign))), scale);
    } else {
      auto const level = V::add_int(V::template shift_left<step_bits>(code), zero);
      return V::mul(V::floats(V::keep_if(V::is_positive(code), level)), scale);
    }
  }

  /// The scale of a group whose largest magnitude has these bits. A magnitude of 2^126 or more, infinity or
  /// NaN has no place among the levels: it makes the whole group NaN, for all to see.
  static inline float scale_of(std::uint32_t largest) {
    if (largest == 0) return 0.0f;
    if (largest >= overflow) return float_of(nan);
    return float_of(largest < least_scale ? least_scale : largest);
  }

  /// Codes of V::width numbers, each rounded to one of its two neighbours so that the mean is the number; the
  /// upper half of `hash` decides for exp_avg, the lower half for exp_avg_sq.
  ///
  /// Below its least level exp_avg is rounded between that and zero. exp_avg_sq goes up to the level: a zero
  /// there under an exp_avg that is not zero would be a step without bounds.
  template <class V>
  static inline typename V::Int encode(typename V::Float value, typename V::Float reciprocal,
                                       typename V::Int hash) {
    // The upper 16 of 20 bits are random, and the rest is a half, 8 units. The product with the reciprocal
    // may miss a level by a few units, which then never decide.
    auto const half = is_signed ? V::template shift_right<12>(hash) : V::template shift_left<4>(hash);
    auto const random = V::or_int(V::and_int(half, V::set_int(0xFFFF0u)), V::set_int(0x8u));
    auto const bits = V::bits(value);
    auto const one_code = V::set_int(1);
    auto const magnitude = magnitude_of<V>(value);
    auto const level = V::mul(V::floats(magnitude), reciprocal);
    auto const code = V::sub_int(V::template shift_right<step_bits>(V::add_int(V::bits(level), random)),
                                 V::set_int(zero_code >> step_bits));
    if constexpr (is_signed) {
      // Below the least level: kept with probability level / least_level. A zero never is.
      auto const kept = V::less(V::mul(V::to_float(random), V::set(least_level * 0x1p-20f)), level);
      auto const sign = V::and_int(V::template shift_right<24>(bits), V::set_int(0x80u));
      return V::keep_if(kept, V::or_int(V::max_int(code, one_code), sign));
    }
    return V::max_int(code, V::min_int(magnitude, one_code));
  }

  template <class V>
  static inline typename V::Int magnitude_of(typename V::Float value) {
    return V::and_int(V::bits(value), V::set_int(0x7FFFFFFFu));
  }

  /// Bits of the largest magnitude of a group to the reciprocal that encode() wants.
  static inline float reciprocal_of(std::uint32_t largest) {
    return 1.0f / float_of(largest < least_scale ? least_scale : largest);
  }
};

}  // namespace
}  // namespace ds_slide
