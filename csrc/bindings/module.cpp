#include "bindings/register.hpp"

PYBIND11_MODULE(_native, module) {
  module.doc() =
      "C++ core of DS-Slide: update threads, AdamW kernels and host memory. Pointers are integers.";
  ds_slide::register_workers(module);
  ds_slide::register_update(module);
  ds_slide::register_memory(module);
  ds_slide::register_io(module);
  ds_slide::register_pool(module);
}
