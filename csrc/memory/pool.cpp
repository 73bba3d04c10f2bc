#include "memory/pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ds_slide {
namespace {

// Longer waits overflow the clock's integer.
constexpr std::chrono::duration<double> kLongest{365.0 * 24 * 3600};

/// Makes the pages exist, so that memory that is not there shows now and the first step takes no page faults.
void touch(Slab& slab) {
  auto* const bytes = static_cast<unsigned char volatile*>(slab.data());
  auto const page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t offset = 0; offset < slab.nbytes(); offset += page) bytes[offset] = 0;
}

struct Waiter {
  std::condition_variable wake;  // its own, so that a returned buffer wakes exactly the thread that gets it
  Slab* given = nullptr;
};

}  // namespace

struct Pool::State {
  pid_t const owner = getpid();
  std::size_t buffer_bytes = 0;
  bool pinned = false;

  std::mutex mutex;         // guards what follows; never held over a system call that may block
  std::deque<Slab> slabs;   // deque: a slab stays where it is
  std::vector<Slab*> free;  // not empty only while nobody waits
  std::list<Waiter*> waiters;
  std::size_t held = 0;  // slabs not yet freed
  std::size_t leased = 0;
  std::size_t leased_peak = 0;
  std::uint64_t waits = 0;
  std::chrono::duration<double> waited{0};
  bool closed = false;

  void require_usable() const {
    if (owner != getpid()) {
      throw std::runtime_error("this Pool was made before a fork; make a new one in the child");
    }
    if (closed) throw std::runtime_error("this Pool is closed; make a new one");
  }

  Slab* take_free() {
    if (free.empty()) return nullptr;
    Slab* const slab = free.back();  // the last one back is the likeliest to be in the cache
    free.pop_back();
    leased_peak = std::max(leased_peak, ++leased);
    return slab;
  }

  void take_back(Slab* slab) noexcept {
    if (owner != getpid()) return;
    {
      std::lock_guard const lock(mutex);
      if (!waiters.empty()) {  // passes from lease to lease, so `leased` stays
        Waiter& waiter = *waiters.front();
        waiters.pop_front();
        waiter.given = slab;
        waiter.wake.notify_one();  // under the lock: once it is let go the waiter may be gone
        return;
      }
      --leased;
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
  if (buffer_bytes == 0 || count == 0) {
    throw std::invalid_argument("a Pool needs at least one buffer of at least one byte, not " +
                                std::to_string(count) + " of " + std::to_string(buffer_bytes) + " bytes");
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
  Slab* slab = nullptr;
  {
    if (_state->owner != getpid()) _state->require_usable();  // before the lock, which a fork may have caught
    std::lock_guard const lock(_state->mutex);
    _state->require_usable();
    slab = _state->take_free();
  }
  return slab == nullptr ? nullptr : std::unique_ptr<Lease>(new Lease(_state, slab));
}

std::unique_ptr<Pool::Lease> Pool::lease(std::chrono::duration<double> timeout) {
  if (!(timeout.count() >= 0)) {  // also NaN
    throw std::invalid_argument("a Pool cannot wait " + std::to_string(timeout.count()) + " seconds");
  }
  if (auto lease = try_lease()) return lease;
  using Clock = std::chrono::steady_clock;
  auto const start = Clock::now();
  auto const deadline = start + std::chrono::duration_cast<Clock::duration>(std::min(timeout, kLongest));
  State& state = *_state;
  Waiter waiter;
  std::unique_lock lock(state.mutex);
  state.require_usable();
  // Between try_lease and here a buffer may have come back.
  if (Slab* const slab = state.take_free()) return std::unique_ptr<Lease>(new Lease(_state, slab));
  auto const place = state.waiters.insert(state.waiters.end(), &waiter);
  ++state.waits;
  auto const served = [&] { return waiter.given != nullptr || state.closed; };
  waiter.wake.wait_until(lock, deadline, served);
  state.waited += Clock::now() - start;
  if (waiter.given != nullptr) {
    Slab* const slab = waiter.given;  // given before a close counts: it is lent, and freed when it comes back
    lock.unlock();
    return std::unique_ptr<Lease>(new Lease(_state, slab));
  }
  if (!state.closed) {  // close() empties the list itself
    state.waiters.erase(place);
    return nullptr;
  }
  throw std::runtime_error("this Pool was closed while a thread waited for a buffer");
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
    for (Waiter* waiter : state.waiters) waiter->wake.notify_one();
    state.waiters.clear();
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
  statistics.waits = _state->waits;
  statistics.waited_s = _state->waited.count();
  return statistics;
}

}  // namespace ds_slide
