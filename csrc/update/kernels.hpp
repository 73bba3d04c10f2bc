// The kernels, written once over a vector type V (portable.hpp, avx2.hpp, avx512.hpp).
//
// Everything here is in an unnamed namespace on purpose: each instruction set compiles its own copy, and a
// shared inline function would let the linker keep the AVX-512 one for machines that lack AVX-512.
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
inline typename V::Float load_weight(AdamwArrays const& arrays, std::size_t index) {
  if constexpr (format == WeightFormat::bf16_planar) {
    return V::load_planar(static_cast<std::uint16_t const*>(arrays.weight) + index,
                          static_cast<std::uint16_t const*>(arrays.remainder) + index);
  }
  if constexpr (format == WeightFormat::fp32) return load<V, Dtype::fp32>(arrays.weight, index);
  if constexpr (format == WeightFormat::fp16_master) return load<V, Dtype::fp32>(arrays.remainder, index);
}

template <class V, WeightFormat format>
inline void store_weight(AdamwArrays const& arrays, std::size_t index, typename V::Float value) {
  if constexpr (format == WeightFormat::bf16_planar) {
    V::store_planar(static_cast<std::uint16_t*>(arrays.weight) + index,
                    static_cast<std::uint16_t*>(arrays.remainder) + index, value);
  }
  if constexpr (format == WeightFormat::fp32) store<V, Dtype::fp32>(arrays.weight, index, value);
  if constexpr (format == WeightFormat::fp16_master) {
    store<V, Dtype::fp32>(arrays.remainder, index, value);
    store<V, Dtype::fp16>(arrays.weight, index, value);
  }
}

/// Fetches what the loop needs V::prefetch_distance elements later. Reaching past the end is harmless.
template <class V, WeightFormat format, Dtype grad_dtype>
inline void prefetch(AdamwArrays const& arrays, std::size_t index) {
  if constexpr (V::prefetch_distance > 0) {
    constexpr std::size_t weight_bytes = format == WeightFormat::fp32 ? 4 : 2;
    constexpr std::size_t remainder_bytes = format == WeightFormat::fp16_master ? 4 : 2;
    constexpr std::size_t grad_bytes = grad_dtype == Dtype::fp32 ? 4 : 2;
    std::size_t const ahead = index + V::prefetch_distance;
    __builtin_prefetch(static_cast<char const*>(arrays.weight) + ahead * weight_bytes);
    if constexpr (format != WeightFormat::fp32) {
      __builtin_prefetch(static_cast<char const*>(arrays.remainder) + ahead * remainder_bytes);
    }
    __builtin_prefetch(arrays.exp_avg + ahead);
    __builtin_prefetch(arrays.exp_avg_sq + ahead);
    __builtin_prefetch(static_cast<char const*>(arrays.grad) + ahead * grad_bytes);
  }
}

/// Elements of [begin, end) that fill whole vectors, counted from begin.
template <class V>
inline std::size_t whole_vectors_end(std::size_t begin, std::size_t end) {
  return begin + (end - begin) / V::width * V::width;
}

/// The vector loop of adamw. Not inlined, so that no compiler can move arithmetic out of the floating-point
/// mode that the caller sets around it: to the optimiser the control register and the arithmetic are
/// unrelated.
template <class V, WeightFormat format, Dtype grad_dtype, bool adam_w_mode>
__attribute__((noinline)) void adamw_vectors(AdamwArrays arrays, AdamwConstants const& constants,
                                             std::size_t begin, std::size_t end) {
  auto const decay = V::set(constants.decay);
  auto const weight_decay = V::set(constants.weight_decay);
  auto const beta1 = V::set(constants.beta1);
  auto const one_minus_beta1 = V::set(constants.one_minus_beta1);
  auto const beta2 = V::set(constants.beta2);
  auto const one_minus_beta2 = V::set(constants.one_minus_beta2);
  auto const inv_bc2_sqrt = V::set(constants.inv_bc2_sqrt);
  auto const step_size = V::set(constants.step_size);
  auto const eps = V::set(constants.eps);
  auto const grad_scale = V::set(constants.grad_scale);

  DS_SLIDE_NO_ALIAS
  for (std::size_t i = begin; i < end; i += V::width) {
    prefetch<V, format, grad_dtype>(arrays, i);
    auto g = V::mul(V::operand(load<V, grad_dtype>(arrays.grad, i)), grad_scale);
    auto w = V::operand(load_weight<V, format>(arrays, i));
    auto m = V::operand(V::load_fp32(arrays.exp_avg + i));
    auto v = V::operand(V::load_fp32(arrays.exp_avg_sq + i));
    if constexpr (adam_w_mode) {
      w = V::mul(w, decay);
    } else {
      g = V::add(g, V::mul(w, weight_decay));
    }
    m = V::add(V::mul(m, beta1), V::mul(g, one_minus_beta1));
    v = V::add(V::mul(v, beta2), V::mul(V::mul(g, g), one_minus_beta2));
    auto const denominator = V::add(V::mul(V::sqrt(v), inv_bc2_sqrt), eps);
    w = V::sub(w, V::mul(V::div(m, denominator), step_size));
    V::store_fp32(arrays.exp_avg + i, m);
    V::store_fp32(arrays.exp_avg_sq + i, v);
    store_weight<V, format>(arrays, i, w);
  }
}

/// One AdamW step in one pass over memory. Every operation is rounded separately, and subnormal operands and
/// results count as zero: by the processor's mode where V::ArithmeticMode sets it, by V's operations
/// otherwise.
template <class V, WeightFormat format, Dtype grad_dtype>
void adamw(AdamwArrays const& arrays, AdamwConstants const& constants, std::size_t begin, std::size_t end) {
  std::size_t const vectors_end = whole_vectors_end<V>(begin, end);
  {
    [[maybe_unused]] typename V::ArithmeticMode const mode{};
    auto const vectors = constants.adam_w_mode ? adamw_vectors<V, format, grad_dtype, true>
                                               : adamw_vectors<V, format, grad_dtype, false>;
    vectors(arrays, constants, begin, vectors_end);
  }
  if (vectors_end < end) {
    portable_kernels().adamw[static_cast<int>(format)][static_cast<int>(grad_dtype)](arrays, constants,
                                                                                     vectors_end, end);
  }
}

/// dst = round(float(dst) + float(src)), IEEE with subnormals, as torch adds.
template <class V, Dtype dst_dtype, Dtype src_dtype>
void accumulate(void* dst, void const* src, std::size_t begin, std::size_t end) {
  std::size_t const vectors_end = whole_vectors_end<V>(begin, end);
  for (std::size_t i = begin; i < vectors_end; i += V::width) {
    store<V, dst_dtype>(dst, i, V::add_ieee(load<V, dst_dtype>(dst, i), load<V, src_dtype>(src, i)));
  }
  if (vectors_end < end) {
    portable_kernels().accumulate[static_cast<int>(dst_dtype)][static_cast<int>(src_dtype)](dst, src,
                                                                                            vectors_end, end);
  }
}

/// Sum of squares in fp64. Element i goes to lane (i - begin) % kLanes whatever the vector width, and the
/// lanes are combined as a tree, so the bits are those of every other instruction set. (A product of two
/// floats is exact in fp64; only the additions round.)
template <class V, Dtype dtype>
double sum_of_squares(void const* data, std::size_t begin, std::size_t end) {
  constexpr std::size_t kLanes = 32;
  std::size_t const groups_end = begin + (end - begin) / kLanes * kLanes;
  typename V::template SquareLanes<kLanes> sums;
  for (std::size_t i = begin; i < groups_end; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; lane += V::width)
      sums.add(lane, load<V, dtype>(data, i + lane));
  }
  double lanes[kLanes];
  sums.store(lanes);
  if (groups_end < end) {
    for (std::size_t i = groups_end; i < end; ++i) {
      double const x = load<Portable, dtype>(data, i);
      lanes[i - groups_end] += x * x;
    }
  }
  for (std::size_t stride = kLanes / 2; stride > 0; stride /= 2) {
    for (std::size_t lane = 0; lane < stride; ++lane) lanes[lane] += lanes[lane + stride];
  }
  return lanes[0];
}

template <class V>
KernelTable make_table() {
  constexpr Dtype bf16 = Dtype::bf16, fp16 = Dtype::fp16, fp32 = Dtype::fp32;
  constexpr WeightFormat planar = WeightFormat::bf16_planar, plain = WeightFormat::fp32,
                         master = WeightFormat::fp16_master;
  return {
      {{adamw<V, planar, bf16>, adamw<V, planar, fp16>, adamw<V, planar, fp32>},
       {adamw<V, plain, bf16>, adamw<V, plain, fp16>, adamw<V, plain, fp32>},
       {adamw<V, master, bf16>, adamw<V, master, fp16>, adamw<V, master, fp32>}},
      {{accumulate<V, bf16, bf16>, accumulate<V, bf16, fp16>, accumulate<V, bf16, fp32>},
       {accumulate<V, fp16, bf16>, accumulate<V, fp16, fp16>, accumulate<V, fp16, fp32>},
       {accumulate<V, fp32, bf16>, accumulate<V, fp32, fp16>, accumulate<V, fp32, fp32>}},
      {sum_of_squares<V, bf16>, sum_of_squares<V, fp16>, sum_of_squares<V, fp32>},
  };
}

}  // namespace
}  // namespace ds_slide
