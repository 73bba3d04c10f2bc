#include "threads/workers.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "threads/float_mode.hpp"

namespace ds_slide {
namespace {

// About 3 us: enough to catch the next of a run of calls (one per parameter group of a block) without a
// futex wake-up, short enough that idle threads cost nothing.
constexpr int kSpins = 100;

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void pin(std::thread& thread, int index, int core) {
  int error = EINVAL;
  if (core >= 0 && core < CPU_SETSIZE) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    error = pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
  }
  if (error != 0) {
    throw std::runtime_error("update thread " + std::to_string(index) + " cannot be pinned to core " +
                             std::to_string(core) + " (" + std::strerror(error) +
                             "); choose cores that this process may use, as listed by "
                             "`taskset -cp $$`, or pass no cores to leave the threads unpinned");
  }
}

}  // namespace

struct Workers::State {
  std::vector<std::thread> threads;
  int num_threads = 0;
  pid_t owner = getpid();
  std::mutex call_mutex;  // held for a whole call: one call at a time

  std::mutex mutex;  // guards what follows
  std::condition_variable start;
  std::condition_variable done;
  Task task = nullptr;
  void const* context = nullptr;
  std::size_t count = 0;
  int active = 0;  // threads that have not finished the current call
  std::atomic<bool> stopping{false};
  std::atomic<std::uint64_t> generation{0};  // number of calls so far; atomic for the spin alone

  // Slices [next, end) of the call that the thread of the same index works through; others take from it when
  // they have finished their own. A thread stays in one stretch of memory: with one queue for all, sixteen
  // threads walk side by side through every array and get in each other's way in the memory banks.
  struct alignas(64) Range {
    std::atomic<std::size_t> next{0};
    std::size_t end = 0;
  };
  std::unique_ptr<Range[]> ranges;

  void loop(int index) noexcept;
  void share_out() noexcept;
};

void Workers::State::share_out() noexcept {
  auto const threads_total = static_cast<std::size_t>(num_threads);
  for (std::size_t thread = 0; thread < threads_total; ++thread) {
    ranges[thread].next.store(count * thread / threads_total, std::memory_order_relaxed);
    ranges[thread].end = count * (thread + 1) / threads_total;
  }
}

void Workers::State::loop(int index) noexcept {
  // A new thread inherits the floating-point mode of its maker, which a user may have changed
  // (torch.set_flush_denormal); results must not depend on that.
  reset_float_mode();
  std::uint64_t seen = 0;
  for (;;) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (generation.load(std::memory_order_relaxed) != seen || stopping.load(std::memory_order_relaxed))
        break;
      pause();
    }
    Task current_task;
    void const* current_context;
    {
      std::unique_lock<std::mutex> lock(mutex);
      start.wait(lock, [&] { return generation.load() != seen || stopping.load(); });
      if (stopping.load()) return;
      seen = generation.load();
      current_task = task;
      current_context = context;
    }
    for (int step = 0; step < num_threads; ++step) {
      Range& range = ranges[(index + step) % num_threads];
      for (;;) {
        std::size_t const slice = range.next.fetch_add(1, std::memory_order_relaxed);
        if (slice >= range.end) break;
        current_task(current_context, slice);
      }
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (--active == 0) done.notify_one();
  }
}

Workers::Workers(int num_threads, std::vector<int> const& cores) : _state(std::make_unique<State>()) {
  if (num_threads < 1) {
    throw std::invalid_argument("Workers needs at least 1 thread, not " + std::to_string(num_threads));
  }
  State& state = *_state;
  state.num_threads = num_threads;
  state.ranges = std::make_unique<State::Range[]>(static_cast<std::size_t>(num_threads));
  try {
    for (int index = 0; index < num_threads; ++index) {
      std::thread& thread = state.threads.emplace_back([&state, index] { state.loop(index); });
      pthread_setname_np(thread.native_handle(), ("slide-update-" + std::to_string(index % 100)).c_str());
      if (!cores.empty()) pin(thread, index, cores[static_cast<std::size_t>(index) % cores.size()]);
    }
  } catch (std::system_error const& error) {
    std::size_t const started = state.threads.size();
    stop(state);
    throw std::runtime_error("only " + std::to_string(started) + " of " + std::to_string(num_threads) +
                             " update threads could be started (" + error.what() +
                             "); ask for fewer threads or raise `ulimit -u`");
  } catch (...) {
    stop(state);
    throw;
  }
}

Workers::~Workers() {
  // In a forked child the threads do not exist: joining them, or destroying a condition variable that they
  // waited on, would hang for ever. The child leaks these few hundred bytes instead.
  if (_state->owner != getpid()) {
    static_cast<void>(_state.release());
    return;
  }
  stop(*_state);
}

void Workers::stop(State& state) {
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.stopping.store(true);
  }
  state.start.notify_all();
  for (std::thread& thread : state.threads) thread.join();
}

int Workers::num_threads() const noexcept { return _state->num_threads; }

void Workers::run(std::size_t count, Task task, void const* context) {
  State& state = *_state;
  if (state.owner != getpid()) {
    throw std::runtime_error(
        "these Workers were made before this process was forked and their threads exist only in the parent; "
        "make new Workers in the child");
  }
  if (count == 0) return;
  std::lock_guard<std::mutex> call(state.call_mutex);
  std::unique_lock<std::mutex> lock(state.mutex);
  state.task = task;
  state.context = context;
  state.count = count;
  state.active = state.num_threads;
  state.share_out();
  state.generation.fetch_add(1);
  state.start.notify_all();
  state.done.wait(lock, [&] { return state.active == 0; });
}

}  // namespace ds_slide
