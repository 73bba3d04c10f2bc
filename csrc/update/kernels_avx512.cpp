#if defined(__x86_64__)

#include "update/avx512.hpp"
#include "update/kernels.hpp"

namespace ds_slide {

KernelTable const& avx512_kernels() {
  static KernelTable const table = make_table<Avx512>();
  return table;
}

}  // namespace ds_slide

#endif
