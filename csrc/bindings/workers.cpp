#include "threads/workers.hpp"

#include <pybind11/stl.h>

#include "bindings/register.hpp"

namespace py = pybind11;

namespace ds_slide {

void register_workers(py::module_& module) {
  py::class_<Workers>(module, "Workers",
                      "Persistent update threads, pinned to cores[i % len(cores)] when cores are given.")
      .def(py::init<int, std::vector<int> const&>(), py::arg("num_threads"), py::arg("cores"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("num_threads", &Workers::num_threads);
}

}  // namespace ds_slide
