#include <cstdint>

#include "bindings/register.hpp"
#include "memory/slab.hpp"

namespace py = pybind11;

namespace ds_slide {

void register_memory(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Slab>(
      module, "Slab", py::buffer_protocol(),
      "Host memory of exact size, page aligned, optionally page-locked for the GPU; a writable buffer.")
      .def(py::init<std::size_t, bool, bool>(), py::arg("nbytes"), py::arg("pin"), py::arg("huge_pages"),
           Release())
      .def_property_readonly("ptr",
                             [](Slab const& slab) { return reinterpret_cast<std::uintptr_t>(slab.data()); })
      .def_property_readonly("nbytes", &Slab::nbytes)
      .def_property_readonly("pinned", &Slab::pinned)
      .def("close", &Slab::close, Release())
      .def_buffer([](Slab& slab) {
        if (slab.data() == nullptr && slab.nbytes() > 0) throw py::value_error("this Slab is closed");
        auto const size = static_cast<py::ssize_t>(slab.nbytes());
        return py::buffer_info(static_cast<std::uint8_t*>(slab.data()), size);
      });
}

}  // namespace ds_slide
