#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "memory/slab.hpp"

namespace ds_slide {

/// A fixed number of equal buffers, each a slab of its own, lent out as leases.
///
/// All memory is allocated at construction, so that the plan's memory is there from the first step on: locked
/// by the driver, or touched page by page. The pool never waits: a wait must be known to the engine's
/// watchdog and end when a lane fails, so a thread that finds the pool empty waits in Python (`BufferPool`).
///
/// Safe to use from any thread. In a forked child the memory is not mapped (Slab) and the lock may have been
/// held at the fork, so there leases are refused and dropped ones forgotten.
class Pool {
  struct State;

 public:
  /// The right to one buffer until released or destroyed; outlives the pool's close().
  class Lease {
   public:
    ~Lease() { release(); }
    Lease(Lease const&) = delete;
    Lease& operator=(Lease const&) = delete;

    /// Gives the buffer back. A second call does nothing, also from another thread.
    void release() noexcept;

    [[nodiscard]] void* data() const noexcept;  // nullptr once released
    [[nodiscard]] std::size_t nbytes() const noexcept { return _nbytes; }

   private:
    friend class Pool;
    Lease(std::shared_ptr<State> state, Slab* slab) noexcept;

    std::shared_ptr<State> _state;
    std::atomic<Slab*> _slab;
    std::size_t _nbytes;
  };

  struct Statistics {
    std::size_t buffers = 0, free = 0, leased_peak = 0, bytes = 0;  // bytes: still held, 0 when all are freed
    bool pinned = false;
  };

  /// `count` may be 0. Throws std::invalid_argument for buffers of no bytes, std::runtime_error naming the
  /// buffer that could not be had, its bytes, the bytes before it, the cause (with the locked-memory limit)
  /// and what to do.
  Pool(std::size_t buffer_bytes, std::size_t count, bool pin, bool huge_pages);
  ~Pool() { close(); }
  Pool(Pool const&) = delete;
  Pool& operator=(Pool const&) = delete;

  /// A buffer with whatever its last user left in it, nullptr where none is free. Throws std::runtime_error
  /// when the pool is closed.
  std::unique_ptr<Lease> try_lease();

  [[nodiscard]] std::size_t buffer_bytes() const noexcept;

  /// The addresses of all buffers, lent or not, for callers that register their pages beforehand.
  [[nodiscard]] std::vector<void*> addresses() const;

  /// Frees what is not lent; lent buffers are freed as they come back. A second call does nothing.
  void close() noexcept;

  [[nodiscard]] Statistics statistics() const;

 private:
  std::shared_ptr<State> _state;
};

}  // namespace ds_slide
