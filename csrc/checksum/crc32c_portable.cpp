#include <array>
#include <cstring>

#include "checksum/checksum.hpp"

namespace ds_slide {
namespace {

// Eight bytes at a time ("slicing by 8", Kounavis and Berry 2005): table[k][b] is the remainder of byte b
// followed by k zero bytes.
constexpr std::uint32_t kPolynomial = 0x82F63B78u;  // Castagnoli's, lowest power in the highest bit
using Table = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Table make_table() {
  Table table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1u) != 0 ? kPolynomial : 0u);
    table[0][byte] = value;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      std::uint32_t const before = table[k - 1][byte];
      table[k][byte] = (before >> 8) ^ table[0][before & 0xFFu];
    }
  }
  return table;
}

constexpr Table kTable = make_table();

/// The eight bytes as a number whose lowest byte is the first one, on machines of either order.
std::uint64_t load(unsigned char const* from) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  std::uint64_t word = 0;
  std::memcpy(&word, from, sizeof(word));
  return word;
#else
  std::uint64_t word = 0;
  for (int byte = 7; byte >= 0; --byte) word = word << 8 | from[byte];
  return word;
#endif
}

}  // namespace

void page_sums_portable(unsigned char const* data, std::size_t pages, std::uint32_t* sums) {
  for (std::size_t page = 0; page < pages; ++page, data += kSumPage) {
    std::uint32_t sum = ~0u;
    for (std::size_t at = 0; at < kSumPage; at += 8) {
      std::uint64_t const word = load(data + at) ^ sum;
      sum = 0;
      for (std::size_t byte = 0; byte < 8; ++byte) sum ^= kTable[7 - byte][word >> (8 * byte) & 0xFFu];
    }
    sums[page] = ~sum;
  }
}

}  // namespace ds_slide
