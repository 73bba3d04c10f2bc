// The kernels of an update rule, one for each format of its states, written once over a vector type V.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "update/block8.hpp"
#include "update/rounding.hpp"
#include "update/step.hpp"

namespace ds_slide {
namespace {

// The vector loops are not inlined, so that no compiler can move arithmetic out of the floating-point mode
// that the caller sets around them: to the optimiser the control register and the arithmetic are unrelated.

/// Calls `body` with the number of each state of a rule, a constant.
template <class Body, std::size_t... number>
inline __attribute__((always_inline)) void each_state(Body const& body, std::index_sequence<number...>) {
  (body(std::integral_constant<std::size_t, number>{}), ...);
}

template <class Rule>
using StatesOf = std::make_index_sequence<Rule::states>;

/// States in fp32.
template <class V, class Rule, Pass pass, WeightFormat format, Dtype grad_dtype>
struct StepFp32 {
  static constexpr std::size_t granule = V::width;
  static __attribute__((noinline)) void run(UpdateArrays arrays, UpdateNumbers const& constants,
                                            std::uint64_t /*high*/, std::size_t begin, std::size_t end) {
    StepNumbers<V, Rule> const numbers(constants);
    DS_SLIDE_NO_ALIAS
    for (std::size_t i = begin; i < end; i += V::width) {
      prefetch<V, Rule, pass, format, grad_dtype, 4>(arrays, i + V::prefetch_distance);
      StepStates<V, Rule> states;
      for (std::size_t k = 0; k < Rule::states; ++k)
        states[k] = V::load_fp32(static_cast<float*>(arrays.states[k]) + i);
      step_vector<V, Rule, pass, format, grad_dtype>(arrays, numbers, i, states);
      if constexpr (pass != Pass::weights) {
        for (std::size_t k = 0; k < Rule::states; ++k)
          V::store_fp32(static_cast<float*>(arrays.states[k]) + i, states[k]);
      }
    }
  }
};

/// States in bf16, rounded stochastically: the first by the upper half of the random bits, the second by the
/// lower.
template <class V, class Rule, Pass pass, WeightFormat format, Dtype grad_dtype>
struct StepBf16 {
  static constexpr std::size_t granule = V::width;
  static __attribute__((noinline)) void run(UpdateArrays arrays, UpdateNumbers const& constants,
                                            std::uint64_t high, std::size_t begin, std::size_t end) {
    StepNumbers<V, Rule> const numbers(constants);
    RandomBits<V> const random(constants.rounding_key, high);
    auto const first = static_cast<std::uint32_t>(arrays.first);
    DS_SLIDE_NO_ALIAS
    for (std::size_t i = begin; i < end; i += V::width) {
      prefetch<V, Rule, pass, format, grad_dtype, 2>(arrays, i + 2 * V::prefetch_distance);
      StepStates<V, Rule> states;
      for (std::size_t k = 0; k < Rule::states; ++k)
        states[k] = V::load_bf16(static_cast<std::uint16_t*>(arrays.states[k]) + i);
      step_vector<V, Rule, pass, format, grad_dtype>(arrays, numbers, i, states);
      if constexpr (pass != Pass::weights) {
        auto const bits = random(first + static_cast<std::uint32_t>(i));
        for (std::size_t k = 0; k < Rule::states; ++k) {
          auto const half =
              k == 0 ? V::template shift_right<16>(bits) : V::and_int(bits, V::set_int(0xFFFFu));
          V::store_bf16_stochastic(static_cast<std::uint16_t*>(arrays.states[k]) + i, states[k], half);
        }
      }
    }
  }
};

/// States as 8-bit codes in groups of kStateGroup, which begin at multiples of it.
template <class V, class Rule, Pass pass, WeightFormat format, Dtype grad_dtype>
struct StepBlock8 {
  // One element at a time ends anywhere, in a short group; vectors take whole groups only.
  static constexpr std::size_t granule = V::width == 1 ? 1 : kStateGroup;
  static constexpr std::size_t group_vectors = kStateGroup / V::width;

  static __attribute__((noinline)) void run(UpdateArrays arrays, UpdateNumbers const& constants,
                                            std::uint64_t high, std::size_t begin, std::size_t end) {
    StepNumbers<V, Rule> const numbers(constants);
    RandomBits<V> const random(constants.rounding_key, high);
    for (std::size_t i = begin; i < end; i += kStateGroup) {
      if constexpr (V::width > 1) group(arrays, numbers, random, i, group_vectors);
      if constexpr (V::width == 1)
        group(arrays, numbers, random, i, end - i < kStateGroup ? end - i : kStateGroup);
    }
  }

 private:
  static inline __attribute__((always_inline)) void group(UpdateArrays const& arrays,
                                                          StepNumbers<V, Rule> const& numbers,
                                                          RandomBits<V> const& random, std::size_t begin,
                                                          std::size_t vectors) {
    constexpr StatesOf<Rule> all{};
    std::uint8_t* codes[Rule::states];
    float* scales[Rule::states];
    typename V::Float scale[Rule::states], values[Rule::states][group_vectors];
    typename V::Int bits[group_vectors], largest[Rule::states];
    for (std::size_t k = 0; k < Rule::states; ++k) {
      codes[k] = static_cast<std::uint8_t*>(arrays.states[k]) + begin;
      scales[k] = arrays.scales[k] + begin / kStateGroup;
      scale[k] = V::set(*scales[k]);
      largest[k] = V::set_int(0);
    }
    auto const first = static_cast<std::uint32_t>(arrays.first + begin);
    DS_SLIDE_NO_ALIAS
    for (std::size_t vector = 0; vector < vectors; ++vector) {
      std::size_t const lane = vector * V::width;
      if (lane % 32 == 0)
        prefetch<V, Rule, pass, format, grad_dtype, 1>(arrays, begin + lane + 4 * V::prefetch_distance);
      StepStates<V, Rule> states;
      each_state(
          [&](auto k) __attribute__((always_inline)) {
            states[k] = Block8<Rule::is_signed[k]>::template decode<V>(codes[k] + lane, scale[k]);
          },
          all);
      step_vector<V, Rule, pass, format, grad_dtype>(arrays, numbers, begin + lane, states);
      if constexpr (pass == Pass::weights) continue;
      bits[vector] = random(first + static_cast<std::uint32_t>(lane));
      each_state(
          [&](auto k) __attribute__((always_inline)) {
            values[k][vector] = states[k];
            auto const magnitude = Block8<Rule::is_signed[k]>::template magnitude_of<V>(states[k]);
            largest[k] = V::max_int(largest[k], magnitude);
          },
          all);
    }
    if constexpr (pass == Pass::weights) return;
    each_state(
        [&](auto k) __attribute__((always_inline)) {
          using Code = Block8<Rule::is_signed[k]>;
          std::uint32_t const most = V::greatest_lane(largest[k]);
          *scales[k] = Code::scale_of(most);
          auto const reciprocal = V::set(Code::reciprocal_of(most));
          DS_SLIDE_NO_ALIAS
          for (std::size_t vector = 0; vector < vectors; ++vector) {
            V::store8(codes[k] + vector * V::width,
                      Code::template encode<V>(values[k][vector], reciprocal, bits[vector]));
          }
          if (most >= Code::overflow) std::memset(codes[k], 0xFF, vectors * V::width);
        },
        all);
  }
};

template <class V, class Rule, Pass pass, StateFormat state, WeightFormat format, Dtype grad_dtype>
using Step = std::conditional_t<
    state == StateFormat::fp32, StepFp32<V, Rule, pass, format, grad_dtype>,
    std::conditional_t<state == StateFormat::bf16, StepBf16<V, Rule, pass, format, grad_dtype>,
                       StepBlock8<V, Rule, pass, format, grad_dtype>>>;

/// One pass of a step over memory. Stochastic rounding counts elements in 32 bits under a key: where the
/// count passes a multiple of 2^32 the key changes. (Such places are multiples of a group, as `first` is.)
template <class V, class Kind, Rule rule, Pass pass, StateFormat state, WeightFormat format, Dtype grad_dtype>
void update(UpdateArrays const& arrays, UpdateNumbers const& numbers, std::size_t begin, std::size_t end) {
  using Kernel = Step<V, Kind, pass, state, format, grad_dtype>;
  while (begin < end) {
    std::uint64_t const number = arrays.first + begin;
    std::uint64_t const left = (std::uint64_t{1} << 32) - (number & 0xFFFFFFFFu);
    std::size_t const run_end = end - begin < left ? end : begin + static_cast<std::size_t>(left);
    std::size_t const vectors_end = begin + (run_end - begin) / Kernel::granule * Kernel::granule;
    {
      [[maybe_unused]] typename V::ArithmeticMode const mode{};
      Kernel::run(arrays, numbers, number >> 32, begin, vectors_end);
    }
    if constexpr (V::width > 1) {
      if (vectors_end < run_end) {
        RuleKernels const& portable = portable_kernels().rules[static_cast<int>(rule)];
        portable.update[static_cast<int>(pass)][static_cast<int>(state)][static_cast<int>(format)]
                       [static_cast<int>(grad_dtype)](arrays, numbers, vectors_end, run_end);
      }
    }
    begin = run_end;
  }
}

}  // namespace
}  // namespace ds_slide
