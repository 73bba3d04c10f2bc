#if defined(__x86_64__)

#include "update/avx2.hpp"
#include "update/kernels.hpp"

namespace ds_slide {

KernelTable const& avx2_kernels() {
  static KernelTable const table = make_table<Avx2>();
  return table;
}

}  // namespace ds_slide

#endif
