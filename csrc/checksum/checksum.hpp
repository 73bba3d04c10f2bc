#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "threads/workers.hpp"

namespace ds_slide {

/// What has a sum of its own: every transfer of the SSD tier begins and ends at a multiple of it.
inline constexpr std::size_t kSumPage = 4096;

/// How CRC32C (Castagnoli's polynomial, as in RFC 3720) is computed; both give the same values.
enum class SumIsa { portable = 0, sse42 = 1 };

[[nodiscard]] SumIsa best_sum_isa();

/// sums[i] = CRC32C of page i of `data`, which needs no alignment. Throws std::invalid_argument when this
/// processor (or this build) lacks `isa`.
void page_sums(Workers& workers, SumIsa isa, void const* data, std::size_t pages, std::uint32_t* sums);

/// The first page of `data` whose CRC32C is not sums[i]; nothing when all agree. A sum of 0 says that the
/// page's is not known, and agrees with every page: one page in 2^32 has that sum.
[[nodiscard]] std::optional<std::size_t> first_wrong_page(Workers& workers, SumIsa isa, void const* data,
                                                          std::size_t pages, std::uint32_t const* sums);

/// sums[i] = CRC32C of page i, for i < pages.
using PageSums = void (*)(unsigned char const* data, std::size_t pages, std::uint32_t* sums);
void page_sums_portable(unsigned char const* data, std::size_t pages, std::uint32_t* sums);
void page_sums_sse42(unsigned char const* data, std::size_t pages, std::uint32_t* sums);

}  // namespace ds_slide
