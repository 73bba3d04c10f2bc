#pragma once

#include <pybind11/pybind11.h>

namespace ds_slide {

void register_workers(pybind11::module_& module);
void register_update(pybind11::module_& module);
void register_memory(pybind11::module_& module);
void register_io(pybind11::module_& module);
void register_pool(pybind11::module_& module);
void register_checksum(pybind11::module_& module);

}  // namespace ds_slide
