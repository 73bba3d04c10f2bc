// One step on one vector, and how each weight format is read and written: what the kernels of every rule and
// state format share.
#pragma once

#include "update/portable.hpp"
#include "update/types.hpp"

// The arrays of one call do not overlap, which the optimiser cannot know and needs to vectorise the portable
// loops.
#if defined(__clang__)
#define DS_SLIDE_NO_ALIAS _Pragma("clang loop vectorize(assume_safety)")
#else
#define DS_SLIDE_NO_ALIAS _Pragma("GCC ivdep")
#endif

namespace ds_slide {
namespace {

template <class V, Dtype dtype>
inline typename V::Float load(void const* data, std::size_t index) {
  if constexpr (dtype == Dtype::bf16) return V::load_bf16(static_cast<std::uint16_t const*>(data) + index);
  if constexpr (dtype == Dtype::fp16) return V::load_fp16(static_cast<std::uint16_t const*>(data) + index);
  if constexpr (dtype == Dtype::fp32) return V::load_fp32(static_cast<float const*>(data) + index);
}

template <class V, Dtype dtype>
inline void store(void* data, std::size_t index, typename V::Float value) {
  if constexpr (dtype == Dtype::bf16) V::store_bf16(static_cast<std::uint16_t*>(data) + index, value);
  if constexpr (dtype == Dtype::fp16) V::store_fp16(static_cast<std::uint16_t*>(data) + index, value);
  if constexpr (dtype == Dtype::fp32) V::store_fp32(static_cast<float*>(data) + index, value);
}

template <class V, WeightFormat format>
inline typename V::Float load_weight(UpdateArrays const& arrays, std::size_t index) {
  if constexpr (format == WeightFormat::bf16_split) {
    return V::load_split(static_cast<std::uint16_t const*>(arrays.weight) + index,
                         static_cast<std::uint16_t const*>(arrays.remainder) + index);
  }
  if constexpr (format == WeightFormat::fp32) return load<V, Dtype::fp32>(arrays.weight, index);
  if constexpr (format == WeightFormat::fp16_master) return load<V, Dtype::fp32>(arrays.remainder, index);
}

/// `streams`: past the caches, to whole vectors at their own alignment.
template <class V, WeightFormat format, bool streams = false>
inline void store_weight(UpdateArrays const& arrays, std::size_t index, typename V::Float value) {
  if constexpr (format == WeightFormat::bf16_split) {
    V::template store_split<streams>(static_cast<std::uint16_t*>(arrays.new_weight) + index,
                                     static_cast<std::uint16_t*>(arrays.remainder) + index, value);
  }
  if constexpr (format == WeightFormat::fp32) {
    V::template store_fp32<streams>(static_cast<float*>(arrays.new_weight) + index, value);
  }
  if constexpr (format == WeightFormat::fp16_master) {
    V::template store_fp32<streams>(static_cast<float*>(arrays.remainder) + index, value);
    V::template store_fp16<streams>(static_cast<std::uint16_t*>(arrays.new_weight) + index, value);
  }
}

/// Fetches element `ahead` of every array, and so the cache line around it. Reaching past the end is
/// harmless.
template <class V, class Rule, Pass pass, WeightFormat format, Dtype grad_dtype, std::size_t state_bytes>
inline void prefetch(UpdateArrays const& arrays, std::size_t ahead) {
  if constexpr (V::prefetch_distance > 0) {
    constexpr std::size_t weight_bytes = format == WeightFormat::fp32 ? 4 : 2;
    constexpr std::size_t remainder_bytes = format == WeightFormat::fp16_master ? 4 : 2;
    constexpr std::size_t grad_bytes = grad_dtype == Dtype::fp32 ? 4 : 2;
    if constexpr (pass != Pass::states) {
      __builtin_prefetch(static_cast<char const*>(arrays.weight) + ahead * weight_bytes);
      if constexpr (format != WeightFormat::fp32) {
        __builtin_prefetch(static_cast<char const*>(arrays.remainder) + ahead * remainder_bytes);
      }
    }
    for (std::size_t k = 0; k < Rule::states; ++k)
      __builtin_prefetch(static_cast<char const*>(arrays.states[k]) + ahead * state_bytes);
    __builtin_prefetch(static_cast<char const*>(arrays.grad) + ahead * grad_bytes);
  }
}

/// Elements of [begin, end) that fill whole vectors, counted from begin.
template <class V>
inline std::size_t whole_vectors_end(std::size_t begin, std::size_t end) {
  return begin + (end - begin) / V::width * V::width;
}

/// The numbers of a step, one in every lane.
template <class V, class Rule>
struct StepNumbers {
  typename V::Float values[Rule::numbers];
  explicit StepNumbers(UpdateNumbers const& numbers) {
    for (std::size_t k = 0; k < Rule::numbers; ++k) values[k] = V::set(numbers.values[k]);
  }
  typename V::Float const& operator[](std::size_t number) const { return values[number]; }
};

/// fp32 values of a rule's states, one array for each (a rule without states has an unused one).
template <class V, class Rule>
using StepStates = typename V::Float[Rule::states > 0 ? Rule::states : 1];

/// One step of the elements from `i`: the weight in memory (unless the pass is over the states, which do not
/// depend on it), `states` in fp32 in place. Every operation is
/// rounded separately, and subnormal operands and results count as zero: by the processor's mode where
/// V::ArithmeticMode sets it, by V's operations otherwise. The first number of every rule is the factor on
/// the gradient.
template <class V, class Rule, Pass pass, WeightFormat format, Dtype grad_dtype>
inline __attribute__((always_inline)) void step_vector(UpdateArrays const& arrays,
                                                       StepNumbers<V, Rule> const& numbers, std::size_t i,
                                                       StepStates<V, Rule>& states) {
  auto const gradient = V::mul(V::operand(load<V, grad_dtype>(arrays.grad, i)), numbers[0]);
  for (std::size_t k = 0; k < Rule::states; ++k) states[k] = V::operand(states[k]);
  if constexpr (pass == Pass::states) {
    Rule::template step<V>(numbers, V::set(0.0F), gradient, states);
  } else {
    auto const weight = V::operand(load_weight<V, format>(arrays, i));
    store_weight<V, format>(arrays, i, Rule::template step<V>(numbers, weight, gradient, states));
  }
}

}  // namespace
}  // namespace ds_slide
