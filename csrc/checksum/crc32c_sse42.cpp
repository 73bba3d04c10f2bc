// Compiled with -msse4.2 (setup.py).
#include "checksum/checksum.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>

#include <cstring>

namespace ds_slide {
namespace {

std::uint64_t load(unsigned char const* from) {
  std::uint64_t word = 0;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

/// The instruction takes a result every cycle but has it after three, so `count` pages side by side hide its
/// latency, with nothing to be put together afterwards.
template <std::size_t count>
void side_by_side(unsigned char const* data, std::uint32_t* sums) {
  std::uint64_t sum[count];
  for (std::size_t page = 0; page < count; ++page) sum[page] = 0xFFFFFFFFu;
  for (std::size_t at = 0; at < kSumPage; at += 8) {
    for (std::size_t page = 0; page < count; ++page) {
      sum[page] = _mm_crc32_u64(sum[page], load(data + page * kSumPage + at));
    }
  }
  for (std::size_t page = 0; page < count; ++page) sums[page] = ~static_cast<std::uint32_t>(sum[page]);
}

}  // namespace

void page_sums_sse42(unsigned char const* data, std::size_t pages, std::uint32_t* sums) {
  std::size_t page = 0;
  for (; page + 4 <= pages; page += 4) side_by_side<4>(data + page * kSumPage, sums + page);
  for (; page < pages; ++page) side_by_side<1>(data + page * kSumPage, sums + page);
}

}  // namespace ds_slide
#endif
