#include "update/kernels.hpp"
#include "update/portable.hpp"

namespace ds_slide {

KernelTable const& portable_kernels() {
  static KernelTable const table = make_table<Portable>();
  return table;
}

}  // namespace ds_slide
