#include "checksum/checksum.hpp"

#include <stdexcept>
#include <string>

#include "bindings/abi.hpp"

namespace ds_slide {
namespace {

/// `isa`: 0 for the best one, else 1 more than its number.
SumIsa isa_of(std::int64_t isa) { return isa == 0 ? best_sum_isa() : static_cast<SumIsa>(isa - 1); }

std::size_t pages_of(std::int64_t nbytes) {
  if (count_of("nbytes", nbytes) % kSumPage != 0) {
    throw std::invalid_argument(std::to_string(nbytes) + " bytes are not a multiple of 4096");
  }
  return static_cast<std::size_t>(nbytes) / kSumPage;
}

}  // namespace
}  // namespace ds_slide

using namespace ds_slide;

DS_SLIDE_ABI(std::int64_t, page_sums,
             (Workers * workers, void const* data, std::int64_t nbytes, std::uint32_t* sums,
              std::int64_t isa)) {
  return guarded([&] { page_sums(*workers, isa_of(isa), data, pages_of(nbytes), sums); });
}

/// 0 where all pages agree, else 1 more than the number of the page.
DS_SLIDE_ABI(std::int64_t, first_wrong_page,
             (Workers * workers, void const* data, std::int64_t nbytes, std::uint32_t const* sums,
              std::int64_t isa)) {
  return guarded([&] {
    auto const page = first_wrong_page(*workers, isa_of(isa), data, pages_of(nbytes), sums);
    return page ? *page + 1 : 0;
  });
}

DS_SLIDE_ABI(std::int64_t, sum_isa, ()) { return static_cast<std::int64_t>(best_sum_isa()) + 1; }
