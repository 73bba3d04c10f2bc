#include "update/update.hpp"

#include <stdexcept>
#include <vector>

#include "threads/processor.hpp"
#include "update/rounding.hpp"
#include "update/stream_copy.hpp"

namespace ds_slide {
namespace {

static_assert(kUpdateSlice % kStateGroup == 0, "a slice begins where a group of 8-bit moments begins");
constexpr std::size_t kAccumulateSlice = 64 * 1024;
constexpr std::size_t kCopySlice = 1024 * 1024;
constexpr std::size_t kSumSegment = 64 * 1024;  // part of the result: another length sums in another order

constexpr std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }
constexpr std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

template <class Body>
void for_slices(Workers& workers, std::size_t numel, std::size_t slice, Body const& body) {
  workers.parallel_for(ceil_div(numel, slice), [&](std::size_t index) {
    std::size_t const begin = index * slice;
    body(index, begin, smaller(begin + slice, numel));
  });
}

/// The old bytes of elements [begin, end), which the kernel then finds in the cache.
void log_slice(UndoLog::Array const& array, std::size_t begin, std::size_t end) {
  std::size_t const first = begin / array.elements_per_item * array.item_bytes;
  std::size_t const last = ceil_div(end, array.elements_per_item) * array.item_bytes;
  stream_copy(static_cast<char*>(array.to) + first, static_cast<char const*>(array.from) + first,
              last - first);
}

}  // namespace

Isa best_isa() {
  static Processor const processor;  // in a virtual machine each question takes 2 us
  return processor.avx512 ? Isa::avx512 : processor.avx2 ? Isa::avx2 : Isa::portable;
}

KernelTable const& kernels_of(Isa isa) {
  static Isa const best = best_isa();
  if (static_cast<int>(isa) > static_cast<int>(best)) {
    throw std::invalid_argument("this processor lacks the instruction set asked for; use isa=\"auto\"");
  }
#if defined(__x86_64__)
  if (isa == Isa::avx512) return avx512_kernels();
  if (isa == Isa::avx2) return avx2_kernels();
#endif
  return portable_kernels();
}

std::uint64_t rounding_key_of(std::uint64_t seed, std::uint64_t step) { return rounding_key(seed, step); }

void update(Workers& workers, KernelTable const& kernels, Rule rule, Pass pass, StateFormat state,
            WeightFormat format, Dtype grad_dtype, UpdateArrays const& arrays, std::size_t numel,
            UpdateNumbers const& numbers, UndoLog const& log) {
  auto const& passes = kernels.rules[static_cast<int>(rule)].update;
  Pass const of_kernel = pass == Pass::rest ? Pass::whole : pass;
  auto const kernel = passes[static_cast<int>(of_kernel)][static_cast<int>(state)][static_cast<int>(format)]
                            [static_cast<int>(grad_dtype)];
  if (kernel == nullptr) {
    throw std::invalid_argument(
        pass == Pass::out_of_place                     ? "there are no steps out of place for short states"
        : state != StateFormat::fp32                   ? "this update rule keeps its states in fp32 only"
        : pass == Pass::with_log || pass == Pass::back ? "steps of a copy of an fp16 master have no way back"
                                                       : "this update rule has no two passes");
  }
  for_slices(workers, numel, kUpdateSlice, [&](std::size_t index, std::size_t begin, std::size_t end) {
    if (pass == Pass::rest) begin += arrays.slices[index].done;
    if (begin == end) return;
    for (std::size_t k = 0; k < log.count; ++k) log_slice(log.arrays[k], begin, end);
    if (log.count > 0) end_streams();
    kernel(arrays, numbers, begin, end);
  });
}

void copy(Workers& workers, void* to, void const* from, std::size_t bytes) {
  for_slices(workers, bytes, kCopySlice, [&](std::size_t, std::size_t begin, std::size_t end) {
    stream_copy(static_cast<char*>(to) + begin, static_cast<char const*>(from) + begin, end - begin);
    end_streams();
  });
}

void accumulate(Workers& workers, KernelTable const& kernels, void* dst, Dtype dst_dtype, void const* src,
                Dtype src_dtype, std::size_t numel) {
  auto const kernel = kernels.accumulate[static_cast<int>(dst_dtype)][static_cast<int>(src_dtype)];
  for_slices(workers, numel, kAccumulateSlice,
             [&](std::size_t, std::size_t begin, std::size_t end) { kernel(dst, src, begin, end); });
}

void join(Workers& workers, KernelTable const& kernels, float* masters, std::uint16_t const* weight,
          std::uint16_t const* remainder, std::size_t numel) {
  for_slices(workers, numel, kAccumulateSlice, [&](std::size_t, std::size_t begin, std::size_t end) {
    kernels.join(masters, weight, remainder, begin, end);
  });
}

void split(Workers& workers, KernelTable const& kernels, float const* masters, std::uint16_t* weight,
           std::uint16_t* remainder, std::size_t numel) {
  for_slices(workers, numel, kAccumulateSlice, [&](std::size_t, std::size_t begin, std::size_t end) {
    kernels.split(masters, weight, remainder, begin, end);
  });
}

double sum_of_squares(Workers& workers, KernelTable const& kernels, void const* data, Dtype dtype,
                      std::size_t numel) {
  auto const kernel = kernels.sum_of_squares[static_cast<int>(dtype)];
  std::vector<double> sums(ceil_div(numel, kSumSegment));
  for_slices(workers, numel, kSumSegment, [&](std::size_t index, std::size_t begin, std::size_t end) {
    sums[index] = kernel(data, begin, end);
  });
  double total = 0.0;
  for (double const sum : sums) total += sum;
  return total;
}

}  // namespace ds_slide
