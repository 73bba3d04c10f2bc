#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace ds_slide {

/// A fixed set of persistent threads that share loops over slices. They sleep between calls.
///
/// Which thread runs which slice is decided at run time and is never part of a result: callers cut their
/// work at fixed boundaries, so that the bits do not depend on the number of threads.
class Workers {
 public:
  /// Starts `num_threads` threads; thread i is pinned to cores[i % cores.size()] unless `cores` is empty.
  /// Throws std::runtime_error when a thread cannot be started or pinned.
  Workers(int num_threads, std::vector<int> const& cores);
  ~Workers();
  Workers(Workers const&) = delete;
  Workers& operator=(Workers const&) = delete;

  [[nodiscard]] int num_threads() const noexcept;

  /// Runs body(0) ... body(count - 1), each exactly once, and returns when all are done. `body` must not
  /// throw. Calls from several threads on one object run one after the other.
  template <class Body>
  void parallel_for(std::size_t count, Body const& body) {
    run(
        count, [](void const* context, std::size_t index) { (*static_cast<Body const*>(context))(index); },
        &body);
  }

 private:
  using Task = void (*)(void const* context, std::size_t index);
  struct State;
  void run(std::size_t count, Task task, void const* context);
  static void stop(State& state);

  std::unique_ptr<State> _state;
};

}  // namespace ds_slide
