#pragma once

#include <cstddef>
#include <cstdint>

#include "threads/workers.hpp"
#include "update/types.hpp"

namespace ds_slide {

/// Hyper-parameters of one step as a user gives them.
struct AdamwOptions {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  std::int64_t step;  // 1 at the first update
  bool bias_correction;
  bool adam_w_mode;
  double grad_scale;       // multiplies the gradient: clip factor / loss scale
  std::uint64_t seed = 0;  // of the random bits that round bf16 and 8-bit moments: one number for a unit
};

/// The best instruction set of this processor.
[[nodiscard]] Isa best_isa();

/// Kernels of `isa`; throws std::invalid_argument when this processor (or this build) lacks it.
[[nodiscard]] KernelTable const& kernels_of(Isa isa);

[[nodiscard]] AdamwConstants make_constants(AdamwOptions const& options);

/// One AdamW step on `numel` elements, in place. Same bits for any thread count and instruction set.
void adamw(Workers& workers, KernelTable const& kernels, StateFormat state, WeightFormat format,
           Dtype grad_dtype, AdamwArrays const& arrays, std::size_t numel, AdamwConstants const& constants);

/// dst[i] = round(float(dst[i]) + float(src[i])).
void accumulate(Workers& workers, KernelTable const& kernels, void* dst, Dtype dst_dtype, void const* src,
                Dtype src_dtype, std::size_t numel);

/// Sum of float(data[i])^2 in fp64. Same bits for any thread count and instruction set.
[[nodiscard]] double sum_of_squares(Workers& workers, KernelTable const& kernels, void const* data,
                                    Dtype dtype, std::size_t numel);

}  // namespace ds_slide
