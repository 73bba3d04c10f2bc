#include <cstdint>

#include "bindings/register.hpp"
#include "memory/generations.hpp"
#include "memory/slab.hpp"

namespace py = pybind11;

namespace ds_slide {
namespace {

using Release = py::call_guard<py::gil_scoped_release>;

void register_slab(py::module_& module) {
  py::class_<Slab>(
      module, "Slab", py::buffer_protocol(),
      "Host memory of exact size, page aligned, optionally page-locked for the GPU; a writable buffer.")
      .def(py::init<std::size_t, bool, bool>(), py::arg("nbytes"), py::arg("pin"), py::arg("huge_pages"),
           Release())
      .def(py::init<int, std::size_t, std::size_t, bool, bool>(), py::arg("descriptor"), py::arg("offset"),
           py::arg("nbytes"), py::arg("pin"), py::arg("huge_pages"), Release())
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

char const* name_of(Generations::Outcome outcome) {
  switch (outcome) {
    case Generations::Outcome::kReached:
      return "reached";
    case Generations::Outcome::kClosed:
      return "closed";
    case Generations::Outcome::kInterrupted:
      return "interrupted";
    case Generations::Outcome::kSignal:
      break;
  }
  return "signal";
}

void register_generations(py::module_& module) {
  py::class_<Generations>(module, "Generations",
                          "Counters in shared memory that their owner raises and others wait for.")
      .def_static("bytes", &Generations::bytes, py::arg("count"))
      .def(py::init([](Slab& slab, std::size_t count) {
             if (slab.nbytes() < Generations::bytes(count)) {
               throw py::value_error("this Slab is too small for so many counters");
             }
             return std::make_unique<Generations>(slab.data(), count);
           }),
           py::arg("slab"), py::arg("count"), py::keep_alive<1, 2>())
      .def("publish", &Generations::publish, py::arg("index"), py::arg("value"), Release())
      .def("store", &Generations::store, py::arg("index"), py::arg("value"))
      .def("close", &Generations::close, Release())
      .def("value", &Generations::value, py::arg("index"))
      .def_property_readonly("closed", &Generations::closed)
      .def(
          "wait",
          [](Generations& self, std::size_t index, std::uint32_t at_least) {
            py::gil_scoped_release release;
            return name_of(self.wait(index, at_least));
          },
          py::arg("index"), py::arg("at_least"))
      .def("interrupt", &Generations::interrupt, Release())
      .def("changes", &Generations::changes)
      .def("wait_change", &Generations::wait_change, py::arg("seen"), Release())
      .def("poke", &Generations::poke, Release());
}

}  // namespace

void register_memory(py::module_& module) {
  register_slab(module);
  register_generations(module);
}

}  // namespace ds_slide
