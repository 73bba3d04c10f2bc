#pragma once

#include <cstddef>
#include <cstdint>

namespace ds_slide {

enum class Dtype { bf16, fp16, fp32 };
inline constexpr int kNumDtypes = 3;

/// How a weight and its fp32 value are stored.
enum class WeightFormat {
  bf16_planar,  // weight: upper 16 bits, rounded half up (what the GPU reads); remainder: the rest, int16
  fp32,         // weight: float; no remainder
  fp16_master,  // weight: fp16 copy, written only; remainder: the float master
};
inline constexpr int kNumWeightFormats = 3;

/// How both moments are stored.
enum class StateFormat {
  fp32,
  bf16,    // rounded stochastically
  block8,  // 8-bit codes, and a float scale for every kStateGroup elements, rounded stochastically
};
inline constexpr int kNumStateFormats = 3;
inline constexpr std::size_t kStateGroup = 64;

enum class Isa { portable, avx2, avx512 };

/// Numbers of one AdamW step, computed in double and rounded once. None of them is subnormal.
struct AdamwConstants {
  float decay;
  float weight_decay;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inv_bc2_sqrt;
  float step_size;
  float eps;
  float grad_scale;
  bool adam_w_mode;
  std::uint64_t rounding_key;  // of the unit's seed and the step, for the random bits of bf16 and block8
};

/// First elements of the arrays of one update. Only element alignment is assumed.
struct AdamwArrays {
  void* weight;
  void* remainder;
  void* exp_avg;
  void* exp_avg_sq;
  void const* grad;
  float* exp_avg_scale = nullptr;  // block8 only
  float* exp_avg_sq_scale = nullptr;
  std::uint64_t first = 0;  // number of element 0 within its unit, a multiple of kStateGroup
};

/// The kernels of one instruction set; each works on elements [begin, end) of its arrays, on one thread.
struct KernelTable {
  using Adamw = void (*)(AdamwArrays const&, AdamwConstants const&, std::size_t begin, std::size_t end);
  using Accumulate = void (*)(void* dst, void const* src, std::size_t begin, std::size_t end);
  using SumOfSquares = double (*)(void const* data, std::size_t begin, std::size_t end);

  Adamw adamw[kNumStateFormats][kNumWeightFormats][kNumDtypes];  // [state][weight][gradient dtype]
  Accumulate accumulate[kNumDtypes][kNumDtypes];                 // [dst][src]
  SumOfSquares sum_of_squares[kNumDtypes];
};

KernelTable const& portable_kernels();
#if defined(__x86_64__)
KernelTable const& avx2_kernels();
KernelTable const& avx512_kernels();
#endif

}  // namespace ds_slide
