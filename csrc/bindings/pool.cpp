#include "memory/pool.hpp"

#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "bindings/register.hpp"

namespace py = pybind11;

namespace ds_slide {
namespace {

void* data_of(Pool::Lease const& lease) {
  void* const data = lease.data();
  if (data == nullptr) throw py::value_error("this Lease was released; its buffer may be another's by now");
  return data;
}

py::dict as_dict(Pool::Statistics const& statistics) {
  py::dict dict;
  dict["buffers"] = statistics.buffers;
  dict["free"] = statistics.free;
  dict["leased_peak"] = statistics.leased_peak;
  dict["bytes"] = statistics.bytes;
  dict["pinned"] = statistics.pinned;
  return dict;
}

}  // namespace

void register_pool(py::module_& module) {
  // Leases come and go with the interpreter's lock held: they take less time than releasing it. After a
  // release the thread could wait 5 ms for another thread that computes.
  py::class_<Pool::Lease>(module, "Lease", py::buffer_protocol(),
                          "One buffer of a Pool, until released or dropped; a writable buffer.")
      .def_property_readonly(
          "ptr", [](Pool::Lease const& lease) { return reinterpret_cast<std::uintptr_t>(data_of(lease)); })
      .def_property_readonly("nbytes", &Pool::Lease::nbytes)
      .def("release", &Pool::Lease::release)
      .def_buffer([](Pool::Lease& lease) {
        auto const size = static_cast<py::ssize_t>(lease.nbytes());
        return py::buffer_info(static_cast<std::uint8_t*>(data_of(lease)), size);
      });
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Pool>(module, "Pool", "Equal host buffers, allocated at once and lent out as leases.")
      .def(py::init<std::size_t, std::size_t, bool, bool>(), py::arg("buffer_bytes"), py::arg("count"),
           py::arg("pin"), py::arg("huge_pages"), Release())
      .def("try_lease", &Pool::try_lease)
      .def_property_readonly("buffer_bytes", &Pool::buffer_bytes)
      .def_property_readonly("addresses",
                             [](Pool const& pool) {
                               std::vector<std::uintptr_t> addresses;
                               for (void* address : pool.addresses())
                                 addresses.push_back(reinterpret_cast<std::uintptr_t>(address));
                               return addresses;
                             })
      .def("close", &Pool::close, Release())
      .def("stats", [](Pool const& pool) { return as_dict(pool.statistics()); });
}

}  // namespace ds_slide
