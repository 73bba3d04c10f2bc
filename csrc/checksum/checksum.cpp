#include "checksum/checksum.hpp"

#include <array>
#include <atomic>
#include <limits>
#include <stdexcept>

#include "threads/processor.hpp"

namespace ds_slide {
namespace {

// 256 KiB: 20 us of one thread, about what it takes to wake another. What is not longer stays on the thread
// that asks.
constexpr std::size_t kSlicePages = 64;
constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

PageSums kernel_of(SumIsa isa) {
  static SumIsa const best = best_sum_isa();
  if (static_cast<int>(isa) > static_cast<int>(best)) {
    throw std::invalid_argument("this processor lacks the instruction set asked for; use isa=\"auto\"");
  }
#if defined(__x86_64__)
  if (isa == SumIsa::sse42) return page_sums_sse42;
#endif
  return page_sums_portable;
}

/// body(first page, one past the last) over all pages.
template <class Body>
void for_slices(Workers& workers, std::size_t pages, Body const& body) {
  if (pages <= kSlicePages) {
    body(0, pages);
    return;
  }
  workers.parallel_for((pages + kSlicePages - 1) / kSlicePages, [&](std::size_t slice) {
    std::size_t const begin = slice * kSlicePages;
    body(begin, begin + kSlicePages < pages ? begin + kSlicePages : pages);
  });
}

}  // namespace

SumIsa best_sum_isa() {
  static Processor const processor;
  return processor.sse42 ? SumIsa::sse42 : SumIsa::portable;
}

void page_sums(Workers& workers, SumIsa isa, void const* data, std::size_t pages, std::uint32_t* sums) {
  PageSums const kernel = kernel_of(isa);
  auto const* bytes = static_cast<unsigned char const*>(data);
  for_slices(workers, pages, [&](std::size_t begin, std::size_t end) {
    kernel(bytes + begin * kSumPage, end - begin, sums + begin);
  });
}

std::optional<std::size_t> first_wrong_page(Workers& workers, SumIsa isa, void const* data, std::size_t pages,
                                            std::uint32_t const* sums) {
  PageSums const kernel = kernel_of(isa);
  auto const* bytes = static_cast<unsigned char const*>(data);
  std::atomic<std::size_t> first{kNone};
  for_slices(workers, pages, [&](std::size_t begin, std::size_t end) {
    std::array<std::uint32_t, kSlicePages> found;
    kernel(bytes + begin * kSumPage, end - begin, found.data());
    for (std::size_t page = begin; page < end; ++page) {
      if (sums[page] == 0 || sums[page] == found[page - begin]) continue;
      std::size_t before = first.load(std::memory_order_relaxed);
      while (page < before && !first.compare_exchange_weak(before, page, std::memory_order_relaxed)) {
      }
      return;
    }
  });
  std::size_t const page = first.load();
  return page == kNone ? std::nullopt : std::optional<std::size_t>(page);
}

}  // namespace ds_slide
