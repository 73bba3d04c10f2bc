#include "memory/pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ds_slide {
namespace {

/// Makes the pages exist, so that memory that is not there shows now and the first step takes no page faults.
void touch(Slab& slab) {
  auto* const bytes = static_cast<unsigned char volatile*>(slab.data());
  auto const page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t offset = 0; offset < slab.nbytes(); offset += page) bytes[offset] = 0;
}

}  // namespace

struct Pool::State {
  pid_t const owner = getpid();
  std::size_t buffer_bytes = 0;
  bool pinned = false;

  std::mutex mutex;        // guards what follows; never held over a system call that may block
  std::deque<Slab> slabs;  // deque: a slab stays where it is
  std::vector<Slab*> free;
  std::size_t held = 0;  // slabs not yet freed: free ones and lent ones
  std::size_t leased_peak = 0;
  bool closed = false;

  void take_back(Slab* slab) noexcept {
    if (owner != getpid()) return;
    {
      std::lock_guard const lock(mutex);
      if (!closed) {
        free.push_back(slab);  // within the capacity reserved at construction: does not throw
        return;
      }
      --held;
    }
    slab->close();
  }
};

Pool::Lease::Lease(std::shared_ptr<State> state, Slab* slab) noexcept
    : _state(std::move(state)), _slab(slab), _nbytes(slab->nbytes()) {}

void Pool::Lease::release() noexcept {
  if (Slab* const slab = _slab.exchange(nullptr)) _state->take_back(slab);
}

void* Pool::Lease::data() const noexcept {
  Slab const* const slab = _slab.load();
  return slab == nullptr ? nullptr : slab->data();
}

Pool::Pool(std::size_t buffer_bytes, std::size_t count, bool pin, bool huge_pages)
    : _state(std::make_shared<State>()) {
  if (buffer_bytes == 0 && count > 0) {
    throw std::invalid_argument("the buffers of a Pool need at least one byte each");
  }
  _state->buffer_bytes = buffer_bytes;
  _state->pinned = pin;
  for (std::size_t index = 0; index < count; ++index) {
    try {
      Slab& slab = _state->slabs.emplace_back(buffer_bytes, pin, huge_pages);
      if (!pin) touch(slab);
    } catch (std::runtime_error const& error) {
      throw std::runtime_error("host tier: buffer " + std::to_string(index + 1) + " of " +
                               std::to_string(count) + " of a pool of " + std::to_string(buffer_bytes) +
                               "-byte buffers could not be had: " + error.what());
    }
  }
  _state->held = count;
  _state->free.reserve(count);
  for (auto slab = _state->slabs.rbegin(); slab != _state->slabs.rend(); ++slab)
    _state->free.push_back(&*slab);
}

std::unique_ptr<Pool::Lease> Pool::try_lease() {
  State& state = *_state;
  if (state.owner != getpid()) {  // before the lock, which a fork may have caught
    throw std::runtime_error("this Pool was made before a fork; make a new one in the child");
  }
  Slab* slab = nullptr;
  {
    std::lock_guard const lock(state.mutex);
    if (state.closed) throw std::runtime_error("this Pool is closed; make a new one");
    if (state.free.empty()) return nullptr;
    slab = state.free.back();  // the last one back is the likeliest to be in the cache
    state.free.pop_back();
    state.leased_peak = std::max(state.leased_peak, state.held - state.free.size());
  }
  return std::unique_ptr<Lease>(new Lease(_state, slab));
}

std::size_t Pool::buffer_bytes() const noexcept { return _state->buffer_bytes; }

std::vector<void*> Pool::addresses() const {
  std::vector<void*> addresses;
  for (Slab const& slab : _state->slabs) addresses.push_back(slab.data());
  return addresses;
}

void Pool::close() noexcept {
  State& state = *_state;
  if (state.owner != getpid()) return;
  std::vector<Slab*> free;
  {
    std::lock_guard const lock(state.mutex);
    state.closed = true;
    free.swap(state.free);
    state.held -= free.size();
  }
  for (Slab* slab : free) slab->close();
}

Pool::Statistics Pool::statistics() const {
  Statistics statistics;
  statistics.buffers = _state->slabs.size();
  statistics.pinned = _state->pinned;
  if (_state->owner != getpid()) return statistics;
  std::lock_guard const lock(_state->mutex);
  statistics.free = _state->free.size();
  statistics.leased_peak = _state->leased_peak;
  statistics.bytes = _state->held * _state->buffer_bytes;
  return statistics;
}

}  // namespace ds_slide
