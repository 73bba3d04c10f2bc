#pragma once

#include <cstddef>
#include <cstdint>

namespace ds_slide {

enum class Dtype { bf16, fp16, fp32 };
inline constexpr int kNumDtypes = 3;

/// How a weight and its fp32 value are stored.
enum class WeightFormat {
  bf16_split,   // weight: upper 16 bits, rounded half up (what the GPU reads); remainder: the rest, int16
  fp32,         // weight: float; no remainder
  fp16_master,  // weight: fp16 copy, written only; remainder: the float master
};
inline constexpr int kNumWeightFormats = 3;

/// How the states of a rule are stored.
enum class StateFormat {
  fp32,
  bf16,    // rounded stochastically
  block8,  // 8-bit codes, and a float scale for every kStateGroup elements, rounded stochastically
};
inline constexpr int kNumStateFormats = 3;
inline constexpr std::size_t kStateGroup = 64;

/// What a kernel does of a step. `weights` and after it `states`, from the same gradient and old states,
/// leave the bits of `whole`: the first reads all and writes the weight, the second reads and writes the
/// states alone. `with_log` is `whole` with a log of what `back` needs to give the old bits back (undo.hpp).
/// After `with_log`, `rest` does what the log had no room for, by the kernels of `whole`. `out_of_place` is
/// `whole` with what it writes in other arrays, and the old ones left as they are (out_of_place.hpp).
enum class Pass { whole, weights, states, with_log, back, out_of_place, rest };
inline constexpr int kNumPasses = 6;  // with kernels of their own

// 16 Ki elements are 416 KiB of split state: small enough that 16 threads end within 30 us of each other,
// large enough that taking the next slice (one atomic add) is not seen.
inline constexpr std::size_t kUpdateSlice = 16 * 1024;

enum class Isa { portable, avx2, avx512 };

// One line for each update rule: the name of its kernels, and the type that states its arithmetic, from a
// header that kernels.hpp includes.
#define DS_SLIDE_UPDATE_RULES(RULE)             \
  RULE(adamw, Adamw<true>)                      \
  RULE(adam, Adamw<false>)                      \
  RULE(lion, Lion)                              \
  RULE(sgd, Sgd<Momentum::none>)                \
  RULE(sgd_momentum, Sgd<Momentum::heavy_ball>) \
  RULE(sgd_nesterov, Sgd<Momentum::nesterov>)

#define DS_SLIDE_ENUMERATOR(name, type) name,
enum class Rule { DS_SLIDE_UPDATE_RULES(DS_SLIDE_ENUMERATOR) };
#undef DS_SLIDE_ENUMERATOR
#define DS_SLIDE_COUNT(name, type) +1
inline constexpr int kNumRules = 0 DS_SLIDE_UPDATE_RULES(DS_SLIDE_COUNT);
#undef DS_SLIDE_COUNT

inline constexpr std::size_t kMaxStates = 2;
inline constexpr std::size_t kMaxNumbers = 10;

/// Numbers of one step in the order of the rule's `Number`; none of them is subnormal.
struct UpdateNumbers {
  float values[kMaxNumbers];
  std::uint64_t rounding_key;  // of the unit's seed and the step, for the random bits of bf16 and block8
};

/// Of one slice of a step with a log: how many elements were done, from its first one on, and those among
/// them whose old numbers were kept whole. 4 KiB.
struct SliceLog {
  static constexpr std::uint32_t room = 255;
  struct Element {
    std::uint32_t index;  // within the slice
    std::uint32_t values[1 + kMaxStates];
  };
  std::uint32_t done;
  std::uint32_t count;
  std::uint64_t unused;
  Element kept[room];
};
static_assert(sizeof(SliceLog) == 4096);

/// First elements of the arrays of one update. Only element alignment is assumed.
struct UpdateArrays {
  void* weight;
  void* new_weight;  // where the new weight is written; `weight` itself, but where others still read that
  void* remainder;
  void const* grad;
  void* states[kMaxStates];        // in the order of the rule
  float* scales[kMaxStates] = {};  // of the states; block8 only
  std::uint64_t first = 0;         // number of element 0 within its unit, a multiple of kStateGroup
  std::uint8_t* low[1 + kMaxStates] =
      {};                      // lowest bytes of the old weights and states; with_log and back only
  SliceLog* slices = nullptr;  // one for each slice; likewise
  void* new_remainder =
      nullptr;  // out_of_place only, as `new_states`; each begins in a cache line of its own
  void* new_states[kMaxStates] = {};
};

inline constexpr std::size_t kCacheLine = 64;

using Update = void (*)(UpdateArrays const&, UpdateNumbers const&, std::size_t begin, std::size_t end);

/// The kernels of one update rule; null where the rule does not keep its states in that format, or cannot be
/// done in two passes.
struct RuleKernels {
  using Formats = Update[kNumWeightFormats][kNumDtypes];  // [weight][gradient dtype]

  std::size_t states;
  std::size_t numbers;
  Formats update[kNumPasses][kNumStateFormats];
};

/// The kernels of one instruction set; each works on elements [begin, end) of its arrays, on one thread.
struct KernelTable {
  using Accumulate = void (*)(void* dst, void const* src, std::size_t begin, std::size_t end);
  using SumOfSquares = double (*)(void const* data, std::size_t begin, std::size_t end);
  using Join = void (*)(float* masters, std::uint16_t const* weight, std::uint16_t const* remainder,
                        std::size_t begin, std::size_t end);
  using Split = void (*)(float const* masters, std::uint16_t* weight, std::uint16_t* remainder,
                         std::size_t begin, std::size_t end);

  RuleKernels rules[kNumRules];
  Accumulate accumulate[kNumDtypes][kNumDtypes];  // [dst][src]
  SumOfSquares sum_of_squares[kNumDtypes];
  Join join;  // of bf16_split
  Split split;
};

KernelTable const& portable_kernels();
#if defined(__x86_64__)
KernelTable const& avx2_kernels();
KernelTable const& avx512_kernels();
#endif

}  // namespace ds_slide
