#include "bindings/register.hpp"

PYBIND11_MODULE(_native, module) {
  module.doc() =
      "C++ core of DS-Slide: update threads, AdamW kernels, host memory, file transfers and checksums. "
      "Pointers are integers.";
  ds_slide::register_workers(module);
  ds_slide::register_update(module);
  ds_slide::register_memory(module);
  ds_slide::register_io(module);
  ds_slide::register_pool(module);
  ds_slide::register_checksum(module);
}
