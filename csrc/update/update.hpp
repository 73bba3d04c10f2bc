#pragma once

#include <cstddef>
#include <cstdint>

#include "threads/workers.hpp"
#include "update/types.hpp"

namespace ds_slide {

/// The best instruction set of this processor.
[[nodiscard]] Isa best_isa();

/// Kernels of `isa`; throws std::invalid_argument when this processor (or this build) lacks it.
[[nodiscard]] KernelTable const& kernels_of(Isa isa);

/// The key of the random bits that round bf16 and 8-bit states. `seed`: one number for a unit; `step`: 1 at
/// the first update.
[[nodiscard]] std::uint64_t rounding_key_of(std::uint64_t seed, std::uint64_t step);

/// Where the old bytes of an update go: each array is copied before it is overwritten.
struct UndoLog {
  struct Array {
    void* to;
    void const* from;
    std::size_t item_bytes;
    std::size_t elements_per_item;
  };
  Array arrays[2 + 2 * kMaxStates];
  std::size_t count = 0;
};

/// One step of `rule` on `numel` elements, in place, or one of its two passes, with what it overwrites in
/// `log`. Same bits for any thread count and instruction set. Throws std::invalid_argument where the rule has
/// no kernels for states of this format, or none that do the step in two passes.
void update(Workers& workers, KernelTable const& kernels, Rule rule, Pass pass, StateFormat state,
            WeightFormat format, Dtype grad_dtype, UpdateArrays const& arrays, std::size_t numel,
            UpdateNumbers const& numbers, UndoLog const& log = {});

/// Copies `bytes` to memory that is not read soon.
void copy(Workers& workers, void* to, void const* from, std::size_t bytes);

/// dst[i] = round(float(dst[i]) + float(src[i])).
void accumulate(Workers& workers, KernelTable const& kernels, void* dst, Dtype dst_dtype, void const* src,
                Dtype src_dtype, std::size_t numel);

/// masters[i] = the fp32 number of a bf16 weight and its remainder.
void join(Workers& workers, KernelTable const& kernels, float* masters, std::uint16_t const* weight,
          std::uint16_t const* remainder, std::size_t numel);

/// The bf16 weights of fp32 masters, rounded half up, and their remainders. `join` gives every number back.
void split(Workers& workers, KernelTable const& kernels, float const* masters, std::uint16_t* weight,
           std::uint16_t* remainder, std::size_t numel);

/// Sum of float(data[i])^2 in fp64. Same bits for any thread count and instruction set.
[[nodiscard]] double sum_of_squares(Workers& workers, KernelTable const& kernels, void const* data,
                                    Dtype dtype, std::size_t numel);

}  // namespace ds_slide
