#include "update/update.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/register.hpp"

namespace py = pybind11;

namespace ds_slide {
namespace {

template <class Value, std::size_t count>
Value named(char const* argument, std::string const& name,
            std::array<std::pair<char const*, Value>, count> const& values) {
  std::string known;
  for (auto const& [candidate, value] : values) {
    if (name == candidate) return value;
    known += std::string(known.empty() ? "" : ", ") + candidate;
  }
  throw std::invalid_argument(std::string(argument) + " is \"" + name + "\" but must be one of " + known);
}

Dtype dtype_of(char const* argument, std::string const& name) {
  static constexpr std::array<std::pair<char const*, Dtype>, 3> kValues{
      {{"bf16", Dtype::bf16}, {"fp16", Dtype::fp16}, {"fp32", Dtype::fp32}}};
  return named(argument, name, kValues);
}

WeightFormat weight_format_of(std::string const& name) {
  static constexpr std::array<std::pair<char const*, WeightFormat>, 3> kValues{
      {{"bf16_split", WeightFormat::bf16_split},
       {"fp32", WeightFormat::fp32},
       {"fp16_master", WeightFormat::fp16_master}}};
  return named("weight_format", name, kValues);
}

StateFormat state_format_of(std::string const& name) {
  static constexpr std::array<std::pair<char const*, StateFormat>, 3> kValues{
      {{"fp32", StateFormat::fp32}, {"bf16", StateFormat::bf16}, {"8bit", StateFormat::block8}}};
  return named("state_format", name, kValues);
}

Pass pass_of(std::string const& name) {
  static constexpr std::array<std::pair<char const*, Pass>, 7> kValues{{{"whole", Pass::whole},
                                                                        {"weights", Pass::weights},
                                                                        {"states", Pass::states},
                                                                        {"with_log", Pass::with_log},
                                                                        {"back", Pass::back},
                                                                        {"out_of_place", Pass::out_of_place},
                                                                        {"rest", Pass::rest}}};
  return named("part", name, kValues);
}

Rule rule_of(std::string const& name) {
#define DS_SLIDE_NAMED(name, type) {#name, Rule::name},
  static constexpr std::array<std::pair<char const*, Rule>, kNumRules> kValues{
      {DS_SLIDE_UPDATE_RULES(DS_SLIDE_NAMED)}};
#undef DS_SLIDE_NAMED
  return named("rule", name, kValues);
}

KernelTable const& kernels_named(std::string const& isa) {
  static constexpr std::array<std::pair<char const*, Isa>, 3> kValues{
      {{"portable", Isa::portable}, {"avx2", Isa::avx2}, {"avx512", Isa::avx512}}};
  return kernels_of(isa == "auto" ? best_isa() : named("isa", isa, kValues));
}

char const* isa_name() {
  switch (best_isa()) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    case Isa::portable:
      break;
  }
  return "portable";
}

std::size_t size_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

/// The address as a pointer, checked as far as an address can be.
void* pointer(char const* argument, std::uintptr_t address, std::size_t element_size, std::size_t numel) {
  if (numel > 0 && (address == 0 || address % element_size != 0)) {
    throw std::invalid_argument(std::string(argument) + " is " + std::to_string(address) +
                                ", which is not the address of " + std::to_string(element_size) +
                                "-byte elements");
  }
  return reinterpret_cast<void*>(address);
}

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

/// `old_ptrs`: of weight (0: it is not overwritten), remainder, states and scales; empty where there is no
/// such log.
UndoLog log_of(UpdateArrays const& arrays, WeightFormat format, StateFormat state, std::size_t states,
               std::vector<std::uintptr_t> const& old_ptrs, std::size_t numel) {
  UndoLog log;
  if (old_ptrs.empty()) return log;
  bool const has_scales = state == StateFormat::block8;
  require_count("old_ptrs", old_ptrs.size(), 2 + (has_scales ? 2 : 1) * states);
  auto const add = [&](std::size_t index, void const* from, std::size_t bytes, std::size_t elements) {
    log.arrays[log.count++] = {pointer("old_ptrs", old_ptrs[index], 1, numel), from, bytes, elements};
  };
  if (old_ptrs[0] != 0) add(0, arrays.weight, weight_size(format), 1);
  if (format != WeightFormat::fp32) add(1, arrays.remainder, remainder_size(format), 1);
  for (std::size_t k = 0; k < states; ++k) {
    add(2 + k, arrays.states[k], state_size(state), 1);
    if (has_scales) add(2 + states + k, arrays.scales[k], sizeof(float), kStateGroup);
  }
  return log;
}

void copy_binding(Workers& workers, std::uintptr_t to_ptr, std::uintptr_t from_ptr, std::size_t nbytes) {
  copy(workers, pointer("to_ptr", to_ptr, 1, nbytes), pointer("from_ptr", from_ptr, 1, nbytes), nbytes);
}

void update_binding(Workers& workers, std::string const& rule_name, std::string const& weight_format,
                    std::uintptr_t weight_ptr, std::uintptr_t remainder_ptr,
                    std::vector<std::uintptr_t> const& state_ptrs, std::uintptr_t grad_ptr,
                    std::string const& grad_dtype, std::size_t numel, std::vector<float> const& numbers,
                    std::string const& isa, std::string const& state_format,
                    std::vector<std::uintptr_t> const& scale_ptrs, std::uint64_t seed, std::int64_t step,
                    std::uint64_t first, std::string const& part, std::uintptr_t new_weight_ptr,
                    std::vector<std::uintptr_t> const& old_ptrs, std::vector<std::uintptr_t> const& low_ptrs,
                    std::uintptr_t slices_ptr, std::uintptr_t new_remainder_ptr,
                    std::vector<std::uintptr_t> const& new_state_ptrs) {
  Rule const rule = rule_of(rule_name);
  KernelTable const& kernels = kernels_named(isa);
  RuleKernels const& own = kernels.rules[static_cast<int>(rule)];
  StateFormat const state = state_format_of(state_format);
  WeightFormat const format = weight_format_of(weight_format);
  Dtype const gradient = dtype_of("grad_dtype", grad_dtype);
  Pass const pass = pass_of(part);
  require_count("state_ptrs", state_ptrs.size(), own.states);
  require_count("numbers", numbers.size(), own.numbers);
  require_count("scale_ptrs", scale_ptrs.size(), state == StateFormat::block8 ? own.states : 0);
  if (step < 1) throw std::invalid_argument("step is " + std::to_string(step) + " but counts from 1");
  UpdateArrays arrays{};
  arrays.weight = pointer("weight_ptr", weight_ptr, weight_size(format), numel);
  if (format != WeightFormat::fp32)
    arrays.remainder = pointer("remainder_ptr", remainder_ptr, remainder_size(format), numel);
  if (first % kStateGroup != 0) {
    throw std::invalid_argument("first is " + std::to_string(first) + " but must be a multiple of " +
                                std::to_string(kStateGroup));
  }
  for (std::size_t k = 0; k < state_ptrs.size(); ++k)
    arrays.states[k] = pointer("state_ptrs", state_ptrs[k], state_size(state), numel);
  for (std::size_t k = 0; k < scale_ptrs.size(); ++k)
    arrays.scales[k] = static_cast<float*>(pointer("scale_ptrs", scale_ptrs[k], 4, numel));
  arrays.new_weight = new_weight_ptr == 0
                          ? arrays.weight
                          : pointer("new_weight_ptr", new_weight_ptr, weight_size(format), numel);
  UndoLog const log = log_of(arrays, format, state, own.states, old_ptrs, numel);
  bool const has_slices = pass == Pass::with_log || pass == Pass::back || pass == Pass::rest;
  require_count("low_ptrs", low_ptrs.size(), has_slices ? 1 + own.states : 0);
  for (std::size_t k = 0; k < low_ptrs.size(); ++k)
    arrays.low[k] = static_cast<std::uint8_t*>(pointer("low_ptrs", low_ptrs[k], 1, numel));
  bool const writes_elsewhere = pass == Pass::out_of_place;
  require_count("new_state_ptrs", new_state_ptrs.size(), writes_elsewhere ? own.states : 0);
  if (writes_elsewhere) {
    arrays.new_weight = pointer("new_weight_ptr", new_weight_ptr, kCacheLine, numel);
    if (format != WeightFormat::fp32)
      arrays.new_remainder = pointer("new_remainder_ptr", new_remainder_ptr, kCacheLine, numel);
    for (std::size_t k = 0; k < new_state_ptrs.size(); ++k)
      arrays.new_states[k] = pointer("new_state_ptrs", new_state_ptrs[k], kCacheLine, numel);
  }
  if (has_slices) arrays.slices = static_cast<SliceLog*>(pointer("slices_ptr", slices_ptr, 8, numel));
  arrays.first = first;
  arrays.grad = pointer("grad_ptr", grad_ptr, size_of(gradient), numel);
  UpdateNumbers constants{};
  std::copy(numbers.begin(), numbers.end(), constants.values);
  constants.rounding_key = rounding_key_of(seed, static_cast<std::uint64_t>(step));
  update(workers, kernels, rule, pass, state, format, gradient, arrays, numel, constants, log);
}

void accumulate_binding(Workers& workers, std::uintptr_t dst_ptr, std::string const& dst_dtype,
                        std::uintptr_t src_ptr, std::string const& src_dtype, std::size_t numel,
                        std::string const& isa) {
  Dtype const dst = dtype_of("dst_dtype", dst_dtype);
  Dtype const src = dtype_of("src_dtype", src_dtype);
  accumulate(workers, kernels_named(isa), pointer("dst_ptr", dst_ptr, size_of(dst), numel), dst,
             pointer("src_ptr", src_ptr, size_of(src), numel), src, numel);
}

double sum_of_squares_binding(Workers& workers, std::uintptr_t ptr, std::string const& dtype,
                              std::size_t numel, std::string const& isa) {
  Dtype const type = dtype_of("dtype", dtype);
  return sum_of_squares(workers, kernels_named(isa), pointer("ptr", ptr, size_of(type), numel), type, numel);
}

}  // namespace

void register_update(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def("isa", &isa_name, "Best instruction set of this processor: avx512, avx2 or portable.");
  module.def("update", &update_binding, "One step of an update rule in place; see _native.pyi.",
             py::arg("workers"), py::arg("rule"), py::arg("weight_format"), py::arg("weight_ptr"),
             py::arg("remainder_ptr"), py::arg("state_ptrs"), py::arg("grad_ptr"), py::arg("grad_dtype"),
             py::arg("numel"), py::arg("numbers"), py::arg("isa") = "auto", py::arg("state_format") = "fp32",
             py::arg("scale_ptrs") = std::vector<std::uintptr_t>{}, py::arg("seed") = 0, py::arg("step") = 1,
             py::arg("first") = 0, py::arg("part") = "whole", py::arg("new_weight_ptr") = 0,
             py::arg("old_ptrs") = std::vector<std::uintptr_t>{},
             py::arg("low_ptrs") = std::vector<std::uintptr_t>{}, py::arg("slices_ptr") = 0,
             py::arg("new_remainder_ptr") = 0, py::arg("new_state_ptrs") = std::vector<std::uintptr_t>{},
             Release());
  module.attr("UPDATE_SLICE") = kUpdateSlice;
  module.attr("SLICE_LOG_BYTES") = sizeof(SliceLog);
  module.def("copy", &copy_binding, "Copy bytes.", py::arg("workers"), py::arg("to_ptr"), py::arg("from_ptr"),
             py::arg("nbytes"), Release());
  module.def("accumulate", &accumulate_binding, "dst = round(float(dst) + float(src)).", py::arg("workers"),
             py::arg("dst_ptr"), py::arg("dst_dtype"), py::arg("src_ptr"), py::arg("src_dtype"),
             py::arg("numel"), py::arg("isa") = "auto", Release());
  module.def("sum_of_squares", &sum_of_squares_binding, "Sum of squares in fp64.", py::arg("workers"),
             py::arg("ptr"), py::arg("dtype"), py::arg("numel"), py::arg("isa") = "auto", Release());
}

}  // namespace ds_slide
