#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <tuple>

#include "bindings/register.hpp"
#include "io/engine.hpp"
#include "io/file.hpp"
#include "io/turns.hpp"

namespace py = pybind11;

namespace ds_slide {
namespace {

// While it waits, next() looks so often whether Ctrl-C was pressed.
constexpr double kSignalCheck_s = 0.2;

/// Deleting waits for the requests in flight, which other Python threads need not.
struct DeleteWithoutGil {
  void operator()(IoEngine* engine) const {
    py::gil_scoped_release release;
    delete engine;
  }
};

/// Runs `call` without the GIL; a FileError becomes OSError(errno, sentence, path).
template <class Call>
auto file_call(Call const& call) {
  try {
    py::gil_scoped_release release;
    return call();
  } catch (FileError const& error) {
    py::object const value = py::reinterpret_steal<py::object>(
        PyObject_CallFunction(PyExc_OSError, "iss", error.error, error.what(), error.path.c_str()));
    if (!value) throw py::error_already_set();
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
    throw py::error_already_set();
  }
}

using PieceTuple = std::tuple<std::int64_t, std::int64_t, std::uintptr_t, std::int64_t>;

void submit(IoEngine& engine, std::int64_t token, bool write, std::vector<PieceTuple> const& pieces,
            bool urgent) {
  std::vector<IoEngine::Piece> converted;
  converted.reserve(pieces.size());
  for (auto const& [file, offset, address, nbytes] : pieces)
    converted.push_back({file, offset, address, nbytes});
  engine.submit(token, write, converted, urgent);
}

py::object as_tuple(IoEngine::Finished const& finished) {
  py::object message = py::none();
  if (finished.error != 0) message = py::str(finished.message);
  return py::make_tuple(finished.token, message, finished.error);
}

/// For a thread that handles no signals: Python's own go to the main thread, so it sleeps until there is
/// news.
py::object next_of_all(IoEngine& engine) {
  std::optional<IoEngine::Finished> finished;
  {
    py::gil_scoped_release release;
    while (!finished && !engine.closed()) finished = engine.next(std::numeric_limits<double>::infinity());
  }
  return finished ? as_tuple(*finished) : py::none();
}

py::object next(IoEngine& engine, std::optional<double> timeout_s) {
  if (!timeout_s) return next_of_all(engine);
  using Clock = std::chrono::steady_clock;
  auto const begin = Clock::now();
  for (;;) {
    double const left = *timeout_s - std::chrono::duration<double>(Clock::now() - begin).count();
    std::optional<IoEngine::Finished> finished;
    bool over = false;
    {
      py::gil_scoped_release release;
      finished = engine.next(std::min(left, kSignalCheck_s));
      over = !finished && engine.closed();
    }
    if (finished) return as_tuple(*finished);
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (over || left <= kSignalCheck_s) return py::none();
  }
}

py::dict stats(IoEngine const& engine) {
  IoEngine::Stats const values = engine.stats();
  py::dict result;
  result["backend"] = engine.backend();
  result["skipped_backends"] = values.skipped_backends;
  result["read_bytes"] = values.read_bytes;
  result["written_bytes"] = values.written_bytes;
  result["read_requests"] = values.read_requests;
  result["write_requests"] = values.write_requests;
  result["repeated_requests"] = values.repeated_requests;
  result["busy_s"] = values.busy_s;
  result["read_busy_s"] = values.read_busy_s;
  result["write_busy_s"] = values.write_busy_s;
  result["in_flight"] = values.in_flight;
  result["unfinished"] = values.unfinished;
  result["registered_buffers"] = values.registered_bytes > 0;
  result["registered_bytes"] = values.registered_bytes;
  result["registered_files"] = values.registered_files;
  result["direct_files"] = values.direct_files;
  result["buffered_files"] = values.buffered_files;
  result["burst_bytes"] = values.burst_bytes;
  result["depth"] = values.depth;
  result["latency_s"] = values.latency_s;
  return result;
}

}  // namespace

void register_io(py::module_& module) {
  py::class_<Turns>(module, "Turns", "The order of reads and writes; see _native.pyi.")
      .def(py::init<std::optional<std::int64_t>, std::int64_t, std::optional<std::int64_t>>(),
           py::arg("burst_bytes"), py::arg("depth"), py::arg("low_depth") = py::none())
      .def("writes_next", &Turns::writes_next, py::arg("reads_wait"), py::arg("writes_wait"))
      .def("started", &Turns::started, py::arg("nbytes"))
      .def(
          "finished",
          [](Turns& turns, std::int64_t nbytes, double now_s, bool both_wait) {
            auto const since =
                std::chrono::duration_cast<Turns::Clock::duration>(std::chrono::duration<double>(now_s));
            turns.finished(nbytes, Turns::Clock::time_point(since), both_wait);
          },
          py::arg("nbytes"), py::arg("now_s"), py::arg("both_wait"))
      .def_property_readonly("burst_bytes", &Turns::burst_bytes)
      .def_property_readonly("depth", &Turns::depth);
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<IoEngine, std::unique_ptr<IoEngine, DeleteWithoutGil>>(
      module, "IoEngine", "Asynchronous transfers between memory and files; see _native.pyi.")
      .def(py::init<std::string const&, std::int64_t, std::int64_t, std::optional<std::int64_t>,
                    std::optional<std::int64_t>>(),
           py::arg("backend"), py::arg("queue_depth"), py::arg("request_bytes"),
           py::arg("burst_bytes") = py::none(), py::arg("low_depth") = py::none(), Release())
      .def_property_readonly("backend", &IoEngine::backend)
      .def(
          "open",
          [](IoEngine& engine, std::string const& path, std::int64_t nbytes, std::optional<int> descriptor) {
            return file_call([&] { return engine.open(path, nbytes, descriptor); });
          },
          py::arg("path"), py::arg("nbytes"), py::arg("descriptor") = py::none())
      .def("is_direct", &IoEngine::is_direct, py::arg("file"), Release())
      .def("register_memory", &IoEngine::register_memory, py::arg("address"), py::arg("nbytes"), Release())
      .def("unregister_memory", &IoEngine::unregister_memory, py::arg("address"), Release())
      .def("submit", &submit, py::arg("token"), py::arg("write"), py::arg("pieces"), py::arg("urgent"),
           Release())
      .def("next", &next, py::arg("timeout_s"))
      .def(
          "sync", [](IoEngine const& engine, std::int64_t file) { file_call([&] { engine.sync(file); }); },
          py::arg("file"))
      .def("stats", &stats)
      .def("close", &IoEngine::close, Release());
}

}  // namespace ds_slide
