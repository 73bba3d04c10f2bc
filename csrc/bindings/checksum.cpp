#include "checksum/checksum.hpp"

#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "bindings/register.hpp"

namespace py = pybind11;

namespace ds_slide {
namespace {

SumIsa isa_of(std::string const& name) {
  if (name == "auto") return best_sum_isa();
  if (name == "sse42") return SumIsa::sse42;
  if (name == "portable") return SumIsa::portable;
  throw std::invalid_argument("isa is \"" + name + "\" but must be one of auto, sse42, portable");
}

std::size_t pages_of(std::size_t nbytes) {
  if (nbytes % kSumPage != 0) {
    throw std::invalid_argument(std::to_string(nbytes) + " bytes are not a multiple of 4096");
  }
  return nbytes / kSumPage;
}

}  // namespace

void register_checksum(py::module_& module) {
  module.def(
      "page_sums",
      [](Workers& workers, std::uintptr_t address, std::size_t nbytes, std::uintptr_t sums_ptr,
         std::string const& isa) {
        page_sums(workers, isa_of(isa), reinterpret_cast<void const*>(address), pages_of(nbytes),
                  reinterpret_cast<std::uint32_t*>(sums_ptr));
      },
      py::arg("workers"), py::arg("address"), py::arg("nbytes"), py::arg("sums_ptr"), py::arg("isa") = "auto",
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "first_wrong_page",
      [](Workers& workers, std::uintptr_t address, std::size_t nbytes, std::uintptr_t sums_ptr,
         std::string const& isa) {
        return first_wrong_page(workers, isa_of(isa), reinterpret_cast<void const*>(address),
                                pages_of(nbytes), reinterpret_cast<std::uint32_t const*>(sums_ptr));
      },
      py::arg("workers"), py::arg("address"), py::arg("nbytes"), py::arg("sums_ptr"), py::arg("isa") = "auto",
      py::call_guard<py::gil_scoped_release>());
  module.def("sum_isa", [] { return best_sum_isa() == SumIsa::sse42 ? "sse42" : "portable"; });
}

}  // namespace ds_slide
