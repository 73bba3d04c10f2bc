// A step that can be undone to the bit. It keeps the lowest byte of each old number, and the way back
// computes the rest from the new numbers and the gradient, as far as a step can be inverted in fp32. The step
// finds the elements where that does not give the old bits back, and keeps their old numbers whole. A slice
// has room for some of these. Where they do not fit, it ends before the vector that brings them.
#pragma once

#include "update/step.hpp"
#include "update/stream_copy.hpp"

namespace ds_slide {
namespace {

// Elements whose lowest bytes are gathered in the cache, to be written in whole lines.
constexpr std::size_t kLogChunk = 1024;

/// The number near `estimate` that has the lowest byte of `low`.
template <class V>
inline __attribute__((always_inline)) typename V::Int nearest_with(typename V::Int estimate,
                                                                   typename V::Int low) {
  auto const distance = V::and_int(V::sub_int(low, estimate), V::set_int(0xFFu));
  auto const sign = V::set_int(0x80u);
  return V::add_int(estimate, V::sub_int(V::xor_int(distance, sign), sign));
}

/// 1 for a NaN, which is kept whole. An operation on two NaN returns one of them by the order of its
/// operands, and the step and the way back may be compiled with different orders. A split master also makes
/// it quiet.
template <class V>
inline __attribute__((always_inline)) typename V::Int is_no_number(typename V::Int bits) {
  auto const magnitude = V::and_int(bits, V::set_int(0x7FFFFFFFu));
  return V::keep_if(V::is_positive(V::sub_int(magnitude, V::set_int(0x7F800000u))), V::set_int(1));
}

template <WeightFormat format>
inline std::uint32_t whole_weight(UpdateArrays const& arrays, std::size_t index) {
  if constexpr (format == WeightFormat::fp32) {
    return bits_of(static_cast<float const*>(arrays.weight)[index]);
  } else {
    std::uint32_t const high = static_cast<std::uint16_t const*>(arrays.weight)[index];
    return high << 16 | static_cast<std::uint16_t const*>(arrays.remainder)[index];
  }
}

template <WeightFormat format>
inline void restore_whole_weight(UpdateArrays const& arrays, std::size_t index, std::uint32_t bits) {
  if constexpr (format == WeightFormat::fp32) {
    static_cast<float*>(arrays.new_weight)[index] = float_of(bits);
  } else {
    static_cast<std::uint16_t*>(arrays.new_weight)[index] = static_cast<std::uint16_t>(bits >> 16);
    static_cast<std::uint16_t*>(arrays.remainder)[index] = static_cast<std::uint16_t>(bits);
  }
}

/// Keeps the elements of a vector from `index` on whose lane of `wrong` is not zero. -> false where there is
/// no room.
template <class V, class Rule, WeightFormat format>
__attribute__((noinline)) bool keep_whole(UpdateArrays const& arrays, SliceLog& log, std::size_t first,
                                          std::size_t index, std::uint32_t const* wrong) {
  std::uint32_t count = log.count;
  for (std::size_t lane = 0; lane < V::width; ++lane) {
    if (wrong[lane] == 0) continue;
    if (count == SliceLog::room) return false;
    SliceLog::Element& kept = log.kept[count++];
    kept.index = static_cast<std::uint32_t>(index + lane - first);
    kept.values[0] = whole_weight<format>(arrays, index + lane);
    for (std::size_t k = 0; k < Rule::states; ++k)
      kept.values[1 + k] = bits_of(static_cast<float const*>(arrays.states[k])[index + lane]);
  }
  log.count = count;
  return true;
}

template <class V, class Rule, WeightFormat format, Dtype grad_dtype>
struct Undoable {
  using Float = typename V::Float;
  using Int = typename V::Int;

  /// The step on elements [begin, end) of the slice that begins at `first`, in whole vectors.
  static __attribute__((noinline)) void step(UpdateArrays arrays, UpdateNumbers const& constants,
                                             SliceLog& log, std::size_t first, std::size_t begin,
                                             std::size_t end) {
    StepNumbers<V, Rule> const numbers(constants);
    typename Rule::template Inverse<V> const inverse(numbers);
    alignas(64) std::uint8_t low[1 + Rule::states][kLogChunk];
    std::size_t i = begin, chunk = begin;
    auto const write_low = [&] {
      for (std::size_t k = 0; k < 1 + Rule::states; ++k)
        stream_copy(arrays.low[k] + chunk, low[k], i - chunk);
      chunk = i;
    };
    for (; i < end; i += V::width) {
      if (i - chunk == kLogChunk) write_low();
      prefetch<V, Rule, Pass::whole, format, grad_dtype, 4>(arrays, i + V::prefetch_distance);
      Int old[1 + kMaxStates];
      StepStates<V, Rule> states;
      auto const weight = load_weight<V, format>(arrays, i);
      old[0] = V::bits(weight);
      for (std::size_t k = 0; k < Rule::states; ++k) {
        auto const state = V::load_fp32(static_cast<float*>(arrays.states[k]) + i);
        old[1 + k] = V::bits(state);
        states[k] = V::operand(state);
      }
      auto const gradient = V::mul(V::operand(load<V, grad_dtype>(arrays.grad, i)), numbers[0]);
      Float move = V::set(0.0F);
      auto const next = Rule::template step<V>(numbers, V::operand(weight), gradient, states, &move);
      Int wrong = is_no_number<V>(old[0]);
      for (std::size_t k = 0; k < Rule::states; ++k) wrong = V::or_int(wrong, is_no_number<V>(old[1 + k]));
      Rule::template back<V>(
          numbers, inverse, next, gradient, states,
          [&](std::size_t number, Float estimate) __attribute__((always_inline)) {
            auto const found = nearest_with<V>(V::bits(estimate), old[number]);
            wrong = V::or_int(wrong, V::xor_int(found, old[number]));
            return V::operand(V::floats(found));
          },
          &move);
      if (V::any(wrong)) {
        std::uint32_t lanes[V::width];
        V::store_int(lanes, wrong);
        if (!keep_whole<V, Rule, format>(arrays, log, first, i, lanes)) break;
      }
      for (std::size_t k = 0; k < 1 + Rule::states; ++k) V::store8(low[k] + (i - chunk), old[k]);
      store_weight<V, format>(arrays, i, next);
      for (std::size_t k = 0; k < Rule::states; ++k)
        V::store_fp32(static_cast<float*>(arrays.states[k]) + i, states[k]);
    }
    write_low();
    end_streams();
    log.done = static_cast<std::uint32_t>(i - first);
  }

  /// The way back for elements [begin, end), in whole vectors, except for elements that were kept whole. A
  /// weight that the step did not replace is not written either: other threads may be reading it.
  static __attribute__((noinline)) void back(UpdateArrays arrays, UpdateNumbers const& constants,
                                             std::size_t begin, std::size_t end) {
    StepNumbers<V, Rule> const numbers(constants);
    typename Rule::template Inverse<V> const inverse(numbers);
    UpdateArrays now = arrays;
    now.weight = arrays.new_weight;
    for (std::size_t i = begin; i < end; i += V::width) {
      StepStates<V, Rule> states;
      Int old[1 + kMaxStates];
      for (std::size_t k = 0; k < Rule::states; ++k)
        states[k] = V::load_fp32(static_cast<float*>(arrays.states[k]) + i);
      auto const gradient = V::mul(V::operand(load<V, grad_dtype>(arrays.grad, i)), numbers[0]);
      Rule::template back<V>(numbers, inverse, load_weight<V, format>(now, i), gradient, states,
                             [&](std::size_t number, Float estimate) __attribute__((always_inline)) {
                               old[number] =
                                   nearest_with<V>(V::bits(estimate), V::load8(arrays.low[number] + i));
                               return V::operand(V::floats(old[number]));
                             });
      store_weight<V, format>(arrays, i, V::floats(old[0]));
      for (std::size_t k = 0; k < Rule::states; ++k)
        V::store_fp32(static_cast<float*>(arrays.states[k]) + i, V::floats(old[1 + k]));
    }
  }
};

/// The step on [begin, end), one slice or what the vectors of one leave.
template <class V, class Kind, Rule rule, WeightFormat format, Dtype grad_dtype>
void step_with_log(UpdateArrays const& arrays, UpdateNumbers const& numbers, std::size_t begin,
                   std::size_t end) {
  SliceLog& log = arrays.slices[begin / kUpdateSlice];
  std::size_t const first = begin / kUpdateSlice * kUpdateSlice,
                    vectors_end = whole_vectors_end<V>(begin, end);
  if (begin == first) log.count = 0;
  {
    [[maybe_unused]] typename V::ArithmeticMode const mode{};
    Undoable<V, Kind, format, grad_dtype>::step(arrays, numbers, log, first, begin, vectors_end);
  }
  if constexpr (V::width > 1) {
    if (vectors_end < end && log.done == vectors_end - first) {
      portable_kernels().rules[static_cast<int>(rule)].update[static_cast<int>(
          Pass::with_log)][0][static_cast<int>(format)][static_cast<int>(grad_dtype)](arrays, numbers,
                                                                                      vectors_end, end);
    }
  }
}

/// The way back from it.
template <class V, class Kind, Rule rule, WeightFormat format, Dtype grad_dtype>
void step_back(UpdateArrays const& arrays, UpdateNumbers const& numbers, std::size_t begin, std::size_t end) {
  SliceLog const& log = arrays.slices[begin / kUpdateSlice];
  std::size_t const first = begin / kUpdateSlice * kUpdateSlice;
  if (end > first + log.done) end = first + log.done;
  if (end <= begin) return;
  std::size_t const vectors_end = whole_vectors_end<V>(begin, end);
  {
    [[maybe_unused]] typename V::ArithmeticMode const mode{};
    Undoable<V, Kind, format, grad_dtype>::back(arrays, numbers, begin, vectors_end);
  }
  if constexpr (V::width > 1) {
    if (vectors_end < end) {
      [[maybe_unused]] typename Portable::ArithmeticMode const mode{};
      Undoable<Portable, Kind, format, grad_dtype>::back(arrays, numbers, vectors_end, end);
    }
  }
  for (std::uint32_t number = 0; number < log.count; ++number) {
    SliceLog::Element const& kept = log.kept[number];
    restore_whole_weight<format>(arrays, first + kept.index, kept.values[0]);
    for (std::size_t k = 0; k < Kind::states; ++k)
      static_cast<float*>(arrays.states[k])[first + kept.index] = float_of(kept.values[1 + k]);
  }
}

}  // namespace
}  // namespace ds_slide
