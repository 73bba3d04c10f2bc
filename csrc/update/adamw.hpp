// The AdamW kernels, one for each format of the moments, written once over a vector type V.
#pragma once

#include <cstring>
#include <type_traits>

#include "update/block8.hpp"
#include "update/rounding.hpp"
#include "update/step.hpp"

namespace ds_slide {
namespace {

// The vector loops are not inlined, so that no compiler can move arithmetic out of the floating-point mode
// that the caller sets around them: to the optimiser the control register and the arithmetic are unrelated.

/// Moments in fp32.
template <class V, WeightFormat format, Dtype grad_dtype, bool adam_w_mode>
struct StepFp32 {
  static constexpr std::size_t granule = V::width;
  static __attribute__((noinline)) void run(AdamwArrays arrays, AdamwConstants const& constants,
                                            std::uint64_t /*high*/, std::size_t begin, std::size_t end) {
    StepNumbers<V> const numbers(constants);
    auto* const exp_avg = static_cast<float*>(arrays.exp_avg);
    auto* const exp_avg_sq = static_cast<float*>(arrays.exp_avg_sq);
    DS_SLIDE_NO_ALIAS
    for (std::size_t i = begin; i < end; i += V::width) {
      prefetch<V, format, grad_dtype, 4>(arrays, i + V::prefetch_distance);
      auto m = V::load_fp32(exp_avg + i);
      auto v = V::load_fp32(exp_avg_sq + i);
      step_vector<V, format, grad_dtype, adam_w_mode>(arrays, numbers, i, m, v);
      V::store_fp32(exp_avg + i, m);
      V::store_fp32(exp_avg_sq + i, v);
    }
  }
};

/// Moments in bf16, rounded stochastically.
template <class V, WeightFormat format, Dtype grad_dtype, bool adam_w_mode>
struct StepBf16 {
  static constexpr std::size_t granule = V::width;
  static __attribute__((noinline)) void run(AdamwArrays arrays, AdamwConstants const& constants,
                                            std::uint64_t high, std::size_t begin, std::size_t end) {
    StepNumbers<V> const numbers(constants);
    RandomBits<V> const random(constants.rounding_key, high);
    auto const first = static_cast<std::uint32_t>(arrays.first);
    auto const lower_half = V::set_int(0xFFFFu);
    auto* const exp_avg = static_cast<std::uint16_t*>(arrays.exp_avg);
    auto* const exp_avg_sq = static_cast<std::uint16_t*>(arrays.exp_avg_sq);
    DS_SLIDE_NO_ALIAS
    for (std::size_t i = begin; i < end; i += V::width) {
      prefetch<V, format, grad_dtype, 2>(arrays, i + 2 * V::prefetch_distance);
      auto m = V::load_bf16(exp_avg + i);
      auto v = V::load_bf16(exp_avg_sq + i);
      step_vector<V, format, grad_dtype, adam_w_mode>(arrays, numbers, i, m, v);
      auto const bits = random(first + static_cast<std::uint32_t>(i));
      V::store_bf16_stochastic(exp_avg + i, m, V::template shift_right<16>(bits));
      V::store_bf16_stochastic(exp_avg_sq + i, v, V::and_int(bits, lower_half));
    }
  }
};

/// Moments as 8-bit codes in groups of kStateGroup, which begin at multiples of it.
template <class V, WeightFormat format, Dtype grad_dtype, bool adam_w_mode>
struct StepBlock8 {
  // One element at a time ends anywhere, in a short group; vectors take whole groups only.
  static constexpr std::size_t granule = V::width == 1 ? 1 : kStateGroup;
  static constexpr std::size_t group_vectors = kStateGroup / V::width;

  static __attribute__((noinline)) void run(AdamwArrays arrays, AdamwConstants const& constants,
                                            std::uint64_t high, std::size_t begin, std::size_t end) {
    StepNumbers<V> const numbers(constants);
    RandomBits<V> const random(constants.rounding_key, high);
    for (std::size_t i = begin; i < end; i += kStateGroup) {
      if constexpr (V::width > 1) group(arrays, numbers, random, i, group_vectors);
      if constexpr (V::width == 1)
        group(arrays, numbers, random, i, end - i < kStateGroup ? end - i : kStateGroup);
    }
  }

 private:
  static inline __attribute__((always_inline)) void group(AdamwArrays const& arrays,
                                                          StepNumbers<V> const& numbers,
                                                          RandomBits<V> const& random, std::size_t begin,
                                                          std::size_t vectors) {
    auto* const exp_avg = static_cast<std::uint8_t*>(arrays.exp_avg) + begin;
    auto* const exp_avg_sq = static_cast<std::uint8_t*>(arrays.exp_avg_sq) + begin;
    float* const exp_avg_scale = arrays.exp_avg_scale + begin / kStateGroup;
    float* const exp_avg_sq_scale = arrays.exp_avg_sq_scale + begin / kStateGroup;
    auto const m_scale = V::set(*exp_avg_scale), v_scale = V::set(*exp_avg_sq_scale);
    auto const first = static_cast<std::uint32_t>(arrays.first + begin);
    typename V::Float m[group_vectors], v[group_vectors];
    typename V::Int bits[group_vectors];
    auto m_largest = V::set_int(0), v_largest = V::set_int(0);
    DS_SLIDE_NO_ALIAS
    for (std::size_t k = 0; k < vectors; ++k) {
      std::size_t const lane = k * V::width;
      if (lane % 32 == 0) prefetch<V, format, grad_dtype, 1>(arrays, begin + lane + 4 * V::prefetch_distance);
      m[k] = Block8<true>::template decode<V>(exp_avg + lane, m_scale);
      v[k] = Block8<false>::template decode<V>(exp_avg_sq + lane, v_scale);
      step_vector<V, format, grad_dtype, adam_w_mode>(arrays, numbers, begin + lane, m[k], v[k]);
      bits[k] = random(first + static_cast<std::uint32_t>(lane));
      m_largest = V::max_int(m_largest, Block8<true>::template magnitude_of<V>(m[k]));
      v_largest = V::max_int(v_largest, Block8<false>::template magnitude_of<V>(v[k]));
    }
    std::uint32_t const m_bits = V::greatest_lane(m_largest), v_bits = V::greatest_lane(v_largest);
    *exp_avg_scale = Block8<true>::scale_of(m_bits);
    *exp_avg_sq_scale = Block8<false>::scale_of(v_bits);
    auto const m_reciprocal = V::set(Block8<true>::reciprocal_of(m_bits));
    auto const v_reciprocal = V::set(Block8<false>::reciprocal_of(v_bits));
    for (std::size_t k = 0; k < vectors; ++k) {
      std::size_t const lane = k * V::width;
      V::store8(exp_avg + lane, Block8<true>::template encode<V>(m[k], m_reciprocal, bits[k]));
      V::store8(exp_avg_sq + lane, Block8<false>::template encode<V>(v[k], v_reciprocal, bits[k]));
    }
    if (m_bits >= Block8<true>::overflow) std::memset(exp_avg, 0xFF, vectors * V::width);
    if (v_bits >= Block8<false>::overflow) std::memset(exp_avg_sq, 0xFF, vectors * V::width);
  }
};

template <class V, StateFormat state, WeightFormat format, Dtype grad_dtype, bool adam_w_mode>
using Step = std::conditional_t<
    state == StateFormat::fp32, StepFp32<V, format, grad_dtype, adam_w_mode>,
    std::conditional_t<state == StateFormat::bf16, StepBf16<V, format, grad_dtype, adam_w_mode>,
                       StepBlock8<V, format, grad_dtype, adam_w_mode>>>;

/// One AdamW step in one pass over memory. Stochastic rounding counts elements in 32 bits under a key: where
/// the count passes a multiple of 2^32 the key changes. (Such places are multiples of a group, as `first`
/// is.)
template <class V, StateFormat state, WeightFormat format, Dtype grad_dtype>
void adamw(AdamwArrays const& arrays, AdamwConstants const& constants, std::size_t begin, std::size_t end) {
  using Decoupled = Step<V, state, format, grad_dtype, true>;
  using Coupled = Step<V, state, format, grad_dtype, false>;
  while (begin < end) {
    std::uint64_t const number = arrays.first + begin;
    std::uint64_t const left = (std::uint64_t{1} << 32) - (number & 0xFFFFFFFFu);
    std::size_t const run_end = end - begin < left ? end : begin + static_cast<std::size_t>(left);
    std::size_t const vectors_end = begin + (run_end - begin) / Decoupled::granule * Decoupled::granule;
    {
      [[maybe_unused]] typename V::ArithmeticMode const mode{};
      auto const run = constants.adam_w_mode ? Decoupled::run : Coupled::run;
      run(arrays, constants, number >> 32, begin, vectors_end);
    }
    if constexpr (V::width > 1) {
      if (vectors_end < run_end) {
        portable_kernels().adamw[static_cast<int>(state)][static_cast<int>(format)]
                                [static_cast<int>(grad_dtype)](arrays, constants, vectors_end, run_end);
      }
    }
    begin = run_end;
  }
}

}  // namespace
}  // namespace ds_slide
