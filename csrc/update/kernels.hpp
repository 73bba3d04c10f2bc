// The kernels, written once over a vector type V (portable.hpp, avx2.hpp, avx512.hpp).
//
// Everything here is in an unnamed namespace on purpose: each instruction set compiles its own copy, and a
// shared inline function would let the linker keep the AVX-512 one for machines that lack AVX-512.
#pragma once

#include <cstring>

#include "update/adamw.hpp"
#include "update/lion.hpp"
#include "update/out_of_place.hpp"
#include "update/portable.hpp"
#include "update/sgd.hpp"
#include "update/state_formats.hpp"
#include "update/types.hpp"
#include "update/undo.hpp"

namespace ds_slide {
namespace {

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

/// Sum of squares in fp64. Element i goes to lane (i - begin) % kLanes for any vector width, and the lanes
/// are combined as a tree, so all instruction sets give the same bits. (A product of two floats is exact in
/// fp64; only the additions round.)
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

/// The fp32 masters of bf16 weights and their remainders.
template <class V>
void join(float* masters, std::uint16_t const* weight, std::uint16_t const* remainder, std::size_t begin,
          std::size_t end) {
  std::size_t const vectors_end = whole_vectors_end<V>(begin, end);
  for (std::size_t i = begin; i < vectors_end; i += V::width)
    V::store_fp32(masters + i, V::load_split(weight + i, remainder + i));
  for (std::size_t i = vectors_end; i < end; ++i)
    masters[i] = Portable::load_split(weight + i, remainder + i);
}

/// The other way round.
template <class V>
void split(float const* masters, std::uint16_t* weight, std::uint16_t* remainder, std::size_t begin,
           std::size_t end) {
  std::size_t const vectors_end = whole_vectors_end<V>(begin, end);
  for (std::size_t i = begin; i < vectors_end; i += V::width)
    V::store_split(weight + i, remainder + i, V::load_fp32(masters + i));
  for (std::size_t i = vectors_end; i < end; ++i)
    Portable::store_split(weight + i, remainder + i, masters[i]);
}

template <class V, class Kind, Rule rule, Pass pass, StateFormat state>
void fill_pass(RuleKernels& kernels) {
  constexpr Dtype bf16 = Dtype::bf16, fp16 = Dtype::fp16, fp32 = Dtype::fp32;
  // A pass over the states leaves the weight alone, whatever its format.
  constexpr WeightFormat plain = WeightFormat::fp32,
                         split = pass == Pass::states ? plain : WeightFormat::bf16_split,
                         master = pass == Pass::states ? plain : WeightFormat::fp16_master;
  RuleKernels::Formats const found = {
      {update<V, Kind, rule, pass, state, split, bf16>, update<V, Kind, rule, pass, state, split, fp16>,
       update<V, Kind, rule, pass, state, split, fp32>},
      {update<V, Kind, rule, pass, state, plain, bf16>, update<V, Kind, rule, pass, state, plain, fp16>,
       update<V, Kind, rule, pass, state, plain, fp32>},
      {update<V, Kind, rule, pass, state, master, bf16>, update<V, Kind, rule, pass, state, master, fp16>,
       update<V, Kind, rule, pass, state, master, fp32>}};
  std::memcpy(kernels.update[static_cast<int>(pass)][static_cast<int>(state)], found, sizeof(found));
}

/// The steps with a log and their ways back. The copy of an fp16 master may be any number, and has none.
template <class V, class Kind, Rule rule>
void fill_undo(RuleKernels& kernels) {
  constexpr Dtype bf16 = Dtype::bf16, fp16 = Dtype::fp16, fp32 = Dtype::fp32;
  constexpr WeightFormat split = WeightFormat::bf16_split, plain = WeightFormat::fp32;
  RuleKernels::Formats const step = {
      {step_with_log<V, Kind, rule, split, bf16>, step_with_log<V, Kind, rule, split, fp16>,
       step_with_log<V, Kind, rule, split, fp32>},
      {step_with_log<V, Kind, rule, plain, bf16>, step_with_log<V, Kind, rule, plain, fp16>,
       step_with_log<V, Kind, rule, plain, fp32>},
      {}};
  RuleKernels::Formats const back = {
      {step_back<V, Kind, rule, split, bf16>, step_back<V, Kind, rule, split, fp16>,
       step_back<V, Kind, rule, split, fp32>},
      {step_back<V, Kind, rule, plain, bf16>, step_back<V, Kind, rule, plain, fp16>,
       step_back<V, Kind, rule, plain, fp32>},
      {}};
  std::memcpy(kernels.update[static_cast<int>(Pass::with_log)][static_cast<int>(StateFormat::fp32)], step,
              sizeof(step));
  std::memcpy(kernels.update[static_cast<int>(Pass::back)][static_cast<int>(StateFormat::fp32)], back,
              sizeof(back));
}

/// The steps out of place.
template <class V, class Kind, Rule rule>
void fill_out_of_place(RuleKernels& kernels) {
  constexpr Dtype bf16 = Dtype::bf16, fp16 = Dtype::fp16, fp32 = Dtype::fp32;
  constexpr WeightFormat split = WeightFormat::bf16_split, plain = WeightFormat::fp32,
                         master = WeightFormat::fp16_master;
  RuleKernels::Formats const found = {
      {step_out_of_place<V, Kind, rule, split, bf16>, step_out_of_place<V, Kind, rule, split, fp16>,
       step_out_of_place<V, Kind, rule, split, fp32>},
      {step_out_of_place<V, Kind, rule, plain, bf16>, step_out_of_place<V, Kind, rule, plain, fp16>,
       step_out_of_place<V, Kind, rule, plain, fp32>},
      {step_out_of_place<V, Kind, rule, master, bf16>, step_out_of_place<V, Kind, rule, master, fp16>,
       step_out_of_place<V, Kind, rule, master, fp32>}};
  std::memcpy(kernels.update[static_cast<int>(Pass::out_of_place)][static_cast<int>(StateFormat::fp32)],
              found, sizeof(found));
}

template <class V, class Kind, Rule rule, StateFormat state>
void fill_format(RuleKernels& kernels) {
  fill_pass<V, Kind, rule, Pass::whole, state>(kernels);
  if constexpr (Kind::two_passes) {
    fill_pass<V, Kind, rule, Pass::weights, state>(kernels);
    fill_pass<V, Kind, rule, Pass::states, state>(kernels);
  }
}

/// `Kind`: the arithmetic of `rule`.
template <class V, class Kind, Rule rule>
void fill_rule(KernelTable& table) {
  static_assert(Kind::states <= kMaxStates && Kind::numbers <= kMaxNumbers);
  RuleKernels& kernels = table.rules[static_cast<int>(rule)];
  kernels.states = Kind::states;
  kernels.numbers = Kind::numbers;
  fill_format<V, Kind, rule, StateFormat::fp32>(kernels);
  fill_undo<V, Kind, rule>(kernels);
  fill_out_of_place<V, Kind, rule>(kernels);
  if constexpr (Kind::short_formats) {
    fill_format<V, Kind, rule, StateFormat::bf16>(kernels);
    fill_format<V, Kind, rule, StateFormat::block8>(kernels);
  }
}

template <class V>
KernelTable make_table() {
  constexpr Dtype bf16 = Dtype::bf16, fp16 = Dtype::fp16, fp32 = Dtype::fp32;
  KernelTable table = {
      {},
      {{accumulate<V, bf16, bf16>, accumulate<V, bf16, fp16>, accumulate<V, bf16, fp32>},
       {accumulate<V, fp16, bf16>, accumulate<V, fp16, fp16>, accumulate<V, fp16, fp32>},
       {accumulate<V, fp32, bf16>, accumulate<V, fp32, fp16>, accumulate<V, fp32, fp32>}},
      {sum_of_squares<V, bf16>, sum_of_squares<V, fp16>, sum_of_squares<V, fp32>},
      join<V>,
      split<V>,
  };
#define DS_SLIDE_FILL(name, type) fill_rule<V, type, Rule::name>(table);
  DS_SLIDE_UPDATE_RULES(DS_SLIDE_FILL)
#undef DS_SLIDE_FILL
  return table;
}

}  // namespace
}  // namespace ds_slide
