// A step that leaves the old numbers as they are and writes the new ones to other arrays. It moves what a
// step in place does, because its stores go past the caches: a plain store would read the line first that it
// then overwrites.
#pragma once

#include "update/step.hpp"
#include "update/stream_copy.hpp"

namespace ds_slide {
namespace {

template <class V, class Rule, WeightFormat format, Dtype grad_dtype, bool streams = true>
struct OutOfPlace {
  /// Elements [begin, end), in whole vectors.
  static __attribute__((noinline)) void run(UpdateArrays const& from, UpdateNumbers const& constants,
                                            std::size_t begin, std::size_t end) {
    StepNumbers<V, Rule> const numbers(constants);
    UpdateArrays const arrays = from;
    UpdateArrays to = from;
    to.remainder = from.new_remainder;
    DS_SLIDE_NO_ALIAS
    for (std::size_t i = begin; i < end; i += V::width) {
      prefetch<V, Rule, Pass::whole, format, grad_dtype, 4>(arrays, i + V::prefetch_distance);
      StepStates<V, Rule> states;
      for (std::size_t k = 0; k < Rule::states; ++k)
        states[k] = V::operand(V::load_fp32(static_cast<float const*>(arrays.states[k]) + i));
      auto const gradient = V::mul(V::operand(load<V, grad_dtype>(arrays.grad, i)), numbers[0]);
      auto const weight = V::operand(load_weight<V, format>(arrays, i));
      store_weight<V, format, streams>(to, i, Rule::template step<V>(numbers, weight, gradient, states));
      for (std::size_t k = 0; k < Rule::states; ++k)
        V::template store_fp32<streams>(static_cast<float*>(to.new_states[k]) + i, states[k]);
    }
  }
};

/// The step on [begin, end), which begins in a cache line of its own.
template <class V, class Kind, Rule rule, WeightFormat format, Dtype grad_dtype>
void step_out_of_place(UpdateArrays const& arrays, UpdateNumbers const& numbers, std::size_t begin,
                       std::size_t end) {
  std::size_t const vectors_end = whole_vectors_end<V>(begin, end);
  {
    [[maybe_unused]] typename V::ArithmeticMode const mode{};
    OutOfPlace<V, Kind, format, grad_dtype>::run(arrays, numbers, begin, vectors_end);
  }
  end_streams();
  if constexpr (V::width > 1) {
    if (vectors_end < end) {
      portable_kernels().rules[static_cast<int>(rule)].update[static_cast<int>(
          Pass::out_of_place)][0][static_cast<int>(format)][static_cast<int>(grad_dtype)](arrays, numbers,
                                                                                          vectors_end, end);
    }
  }
}

}  // namespace
}  // namespace ds_slide
