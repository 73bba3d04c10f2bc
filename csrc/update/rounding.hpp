// Random bits for stochastic rounding: a hash of (seed, step, element), so that a result depends neither on
// which thread, instruction set or chunk updates an element nor on where its state lives.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ds_slide {
namespace {

/// The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit of the result depends on every bit of
/// z.
inline std::uint64_t mix64(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/// What a unit's seed and the number of the step make of the random bits.
inline std::uint64_t rounding_key(std::uint64_t seed, std::uint64_t step) {
  return mix64(mix64(seed + 0x9E3779B97F4A7C15u) + step);
}

/// 32 random bits for every lane; the upper half rounds exp_avg, the lower half exp_avg_sq. Elements are
/// counted in 32 bits here; `high` is the rest of their 64-bit number.
template <class V>
struct RandomBits {
  typename V::Int first, second;
  RandomBits(std::uint64_t key, std::uint64_t high) {
    std::uint64_t const mixed = mix64(key + high);
    first = V::add_int(V::lane_numbers(), V::set_int(static_cast<std::uint32_t>(mixed)));
    second = V::set_int(static_cast<std::uint32_t>(mixed >> 32));
  }
  /// The random bits of the elements from number `index` on. hash-prospector's exhaustive search found these
  /// multipliers and shifts least biased for 32 bits with two multiplications ("lowbias32").
  typename V::Int operator()(std::uint32_t index) const {
    auto x = V::add_int(V::set_int(index), first);
    x = V::xor_int(x, V::template shift_right<16>(x));
    x = V::mul_int(x, V::set_int(0x7FEB352Du));
    x = V::add_int(V::xor_int(x, V::template shift_right<15>(x)), second);
    x = V::mul_int(x, V::set_int(0x846CA68Bu));
    return V::xor_int(x, V::template shift_right<16>(x));
  }
};

}  // namespace
}  // namespace ds_slide
