#include "update/update.hpp"

#include <stdexcept>
#include <string>

#include "bindings/abi.hpp"

namespace ds_slide {
namespace {

// The names of each enumeration, in the order of its numbers.
#define DS_SLIDE_NAME(name, type) " " #name
constexpr char const* kNames =
    "rule" DS_SLIDE_UPDATE_RULES(DS_SLIDE_NAME) "\n"
    "weight_format bf16_split fp32 fp16_master\n"
    "state_format fp32 bf16 8bit\n"
    "dtype bf16 fp16 fp32\n"
    "part whole weights states with_log back out_of_place rest\n"
    "isa portable avx2 avx512\n";
#undef DS_SLIDE_NAME

/// `isa`: 0 for the best one, else 1 more than its number.
KernelTable const& kernels_numbered(std::int64_t isa) {
  return kernels_of(isa == 0 ? best_isa() : static_cast<Isa>(isa - 1));
}

std::size_t size_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

void require_count(char const* argument, std::size_t count, std::size_t needed) {
  if (count == needed) return;
  throw std::invalid_argument(std::string(argument) + " has " + std::to_string(count) +
                              " elements but the rule has " + std::to_string(needed));
}

std::size_t weight_size(WeightFormat format) { return format == WeightFormat::fp32 ? 4 : 2; }
std::size_t remainder_size(WeightFormat format) { return format == WeightFormat::fp16_master ? 4 : 2; }
std::size_t state_size(StateFormat state) {
  return state == StateFormat::fp32 ? 4 : state == StateFormat::bf16 ? 2 : 1;
}

struct Addresses {
  std::uint64_t const* values;
  std::size_t count;
};

/// The arguments of an update, one after the other: a number each, and before a list its length. Python packs
/// them in one go, in the order in which they are read here.
class Words {
 public:
  Words(std::uint64_t const* words, std::int64_t count) : _next(words), _end(words + count) {}

  std::uint64_t number() {
    require(1);
    return *_next++;
  }
  template <class Enumeration>
  Enumeration enumerator(int count) {
    std::uint64_t const value = number();
    if (value >= static_cast<std::uint64_t>(count)) throw std::logic_error("a name has an unknown number");
    return static_cast<Enumeration>(value);
  }
  Addresses list() {
    std::uint64_t const count = number();
    require(count);
    _next += count;
    return {_next - count, static_cast<std::size_t>(count)};
  }
  void end() const {
    if (_next != _end) throw std::logic_error("an update has more arguments than are read");
  }

 private:
  void require(std::uint64_t count) const {
    if (count > static_cast<std::uint64_t>(_end - _next))
      throw std::logic_error("an update has fewer arguments than are read");
  }

  std::uint64_t const* _next;
  std::uint64_t const* _end;
};

/// `old_ptrs`: of weight (0: it is not overwritten), remainder, states and scales; empty where there is no
/// such log.
UndoLog log_of(UpdateArrays const& arrays, WeightFormat format, StateFormat state, std::size_t states,
               Addresses old_ptrs, std::size_t numel) {
  UndoLog log;
  if (old_ptrs.count == 0) return log;
  bool const has_scales = state == StateFormat::block8;
  require_count("old_ptrs", old_ptrs.count, 2 + (has_scales ? 2 : 1) * states);
  auto const add = [&](std::size_t index, void const* from, std::size_t bytes, std::size_t elements) {
    log.arrays[log.count++] = {pointer("old_ptrs", old_ptrs.values[index], 1, numel), from, bytes, elements};
  };
  if (old_ptrs.values[0] != 0) add(0, arrays.weight, weight_size(format), 1);
  if (format != WeightFormat::fp32) add(1, arrays.remainder, remainder_size(format), 1);
  for (std::size_t k = 0; k < states; ++k) {
    add(2 + k, arrays.states[k], state_size(state), 1);
    if (has_scales) add(2 + states + k, arrays.scales[k], sizeof(float), kStateGroup);
  }
  return log;
}

void update_from(Workers& workers, Words words, float const* numbers, std::int64_t num_numbers) {
  auto const rule = words.enumerator<Rule>(kNumRules);
  auto const format = words.enumerator<WeightFormat>(kNumWeightFormats);
  auto const gradient = words.enumerator<Dtype>(kNumDtypes);
  auto const state = words.enumerator<StateFormat>(kNumStateFormats);
  auto const pass = words.enumerator<Pass>(kNumPasses + 1);
  KernelTable const& kernels = kernels_numbered(static_cast<std::int64_t>(words.number()));
  RuleKernels const& own = kernels.rules[static_cast<int>(rule)];
  auto const numel = static_cast<std::size_t>(words.number());
  auto const step = words.number(), seed = words.number(), first = words.number();
  auto const weight_ptr = words.number(), remainder_ptr = words.number(), grad_ptr = words.number();
  auto const new_weight_ptr = words.number(), new_remainder_ptr = words.number(), slices_ptr = words.number();
  Addresses const state_ptrs = words.list(), scale_ptrs = words.list(), old_ptrs = words.list();
  Addresses const low_ptrs = words.list(), new_state_ptrs = words.list();
  words.end();

  require_count("state_ptrs", state_ptrs.count, own.states);
  require_count("numbers", static_cast<std::size_t>(num_numbers), own.numbers);
  require_count("scale_ptrs", scale_ptrs.count, state == StateFormat::block8 ? own.states : 0);
  if (step < 1) throw std::invalid_argument("step is " + std::to_string(step) + " but counts from 1");
  UpdateArrays arrays{};
  arrays.weight = pointer("weight_ptr", weight_ptr, weight_size(format), numel);
  if (format != WeightFormat::fp32)
    arrays.remainder = pointer("remainder_ptr", remainder_ptr, remainder_size(format), numel);
  if (first % kStateGroup != 0) {
    throw std::invalid_argument("first is " + std::to_string(first) + " but must be a multiple of " +
                                std::to_string(kStateGroup));
  }
  for (std::size_t k = 0; k < state_ptrs.count; ++k)
    arrays.states[k] = pointer("state_ptrs", state_ptrs.values[k], state_size(state), numel);
  for (std::size_t k = 0; k < scale_ptrs.count; ++k)
    arrays.scales[k] = static_cast<float*>(pointer("scale_ptrs", scale_ptrs.values[k], 4, numel));
  arrays.new_weight = new_weight_ptr == 0
                          ? arrays.weight
                          : pointer("new_weight_ptr", new_weight_ptr, weight_size(format), numel);
  UndoLog const log = log_of(arrays, format, state, own.states, old_ptrs, numel);
  bool const has_slices = pass == Pass::with_log || pass == Pass::back || pass == Pass::rest;
  require_count("low_ptrs", low_ptrs.count, has_slices ? 1 + own.states : 0);
  for (std::size_t k = 0; k < low_ptrs.count; ++k)
    arrays.low[k] = static_cast<std::uint8_t*>(pointer("low_ptrs", low_ptrs.values[k], 1, numel));
  bool const writes_elsewhere = pass == Pass::out_of_place;
  require_count("new_state_ptrs", new_state_ptrs.count, writes_elsewhere ? own.states : 0);
  if (writes_elsewhere) {
    arrays.new_weight = pointer("new_weight_ptr", new_weight_ptr, kCacheLine, numel);
    if (format != WeightFormat::fp32)
      arrays.new_remainder = pointer("new_remainder_ptr", new_remainder_ptr, kCacheLine, numel);
    for (std::size_t k = 0; k < new_state_ptrs.count; ++k)
      arrays.new_states[k] = pointer("new_state_ptrs", new_state_ptrs.values[k], kCacheLine, numel);
  }
  if (has_slices) arrays.slices = static_cast<SliceLog*>(pointer("slices_ptr", slices_ptr, 8, numel));
  arrays.first = first;
  arrays.grad = pointer("grad_ptr", grad_ptr, size_of(gradient), numel);
  UpdateNumbers constants{};
  for (std::size_t k = 0; k < own.numbers; ++k) constants.values[k] = numbers[k];
  constants.rounding_key = rounding_key_of(seed, step);
  update(workers, kernels, rule, pass, state, format, gradient, arrays, numel, constants, log);
}

}  // namespace
}  // namespace ds_slide

using namespace ds_slide;

/// A line for each enumeration: its name and the names of its numbers from 0 on.
DS_SLIDE_ABI(char const*, names, ()) { return kNames; }

/// The number of the best instruction set of this processor.
DS_SLIDE_ABI(std::int64_t, isa, ()) { return static_cast<std::int64_t>(best_isa()); }

DS_SLIDE_ABI(std::int64_t, update_slice, ()) { return kUpdateSlice; }

DS_SLIDE_ABI(std::int64_t, slice_log_bytes, ()) { return sizeof(SliceLog); }

/// `words`: see Words. `numbers`: those of the rule for this step.
DS_SLIDE_ABI(std::int64_t, update,
             (Workers * workers, std::uint64_t const* words, std::int64_t count, float const* numbers,
              std::int64_t num_numbers)) {
  return guarded([&] { update_from(*workers, Words(words, count), numbers, num_numbers); });
}

DS_SLIDE_ABI(std::int64_t, copy,
             (Workers * workers, std::uint64_t to_ptr, std::uint64_t from_ptr, std::int64_t nbytes)) {
  return guarded([&] {
    std::size_t const size = count_of("nbytes", nbytes);
    copy(*workers, pointer("to_ptr", to_ptr, 1, size), pointer("from_ptr", from_ptr, 1, size), size);
  });
}

DS_SLIDE_ABI(std::int64_t, accumulate,
             (Workers * workers, std::uint64_t dst_ptr, std::int64_t dst_dtype, std::uint64_t src_ptr,
              std::int64_t src_dtype, std::int64_t numel, std::int64_t isa)) {
  return guarded([&] {
    auto const dst = static_cast<Dtype>(dst_dtype), src = static_cast<Dtype>(src_dtype);
    std::size_t const count = count_of("numel", numel);
    accumulate(*workers, kernels_numbered(isa), pointer("dst_ptr", dst_ptr, size_of(dst), count), dst,
               pointer("src_ptr", src_ptr, size_of(src), count), src, count);
  });
}

DS_SLIDE_ABI(std::int64_t, join,
             (Workers * workers, std::uint64_t masters_ptr, std::uint64_t weight_ptr,
              std::uint64_t remainder_ptr, std::int64_t numel, std::int64_t isa)) {
  return guarded([&] {
    std::size_t const count = count_of("numel", numel);
    join(*workers, kernels_numbered(isa), static_cast<float*>(pointer("masters_ptr", masters_ptr, 4, count)),
         static_cast<std::uint16_t const*>(pointer("weight_ptr", weight_ptr, 2, count)),
         static_cast<std::uint16_t const*>(pointer("remainder_ptr", remainder_ptr, 2, count)), count);
  });
}

DS_SLIDE_ABI(std::int64_t, split,
             (Workers * workers, std::uint64_t masters_ptr, std::uint64_t weight_ptr,
              std::uint64_t remainder_ptr, std::int64_t numel, std::int64_t isa)) {
  return guarded([&] {
    std::size_t const count = count_of("numel", numel);
    split(*workers, kernels_numbered(isa),
          static_cast<float const*>(pointer("masters_ptr", masters_ptr, 4, count)),
          static_cast<std::uint16_t*>(pointer("weight_ptr", weight_ptr, 2, count)),
          static_cast<std::uint16_t*>(pointer("remainder_ptr", remainder_ptr, 2, count)), count);
  });
}

DS_SLIDE_ABI(std::int64_t, sum_of_squares,
             (Workers * workers, std::uint64_t ptr, std::int64_t dtype, std::int64_t numel, std::int64_t isa,
              double* sum)) {
  return guarded([&] {
    auto const type = static_cast<Dtype>(dtype);
    std::size_t const count = count_of("numel", numel);
    *sum = sum_of_squares(*workers, kernels_numbered(isa), pointer("ptr", ptr, size_of(type), count), type,
                          count);
  });
}
