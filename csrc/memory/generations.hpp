#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ds_slide {

/// Counters that one process, the owner, raises and others wait for, in memory that all of them map: by them
/// the owner tells which generation of each of its buffers the others may read.
///
/// No process polls: a waiting process sleeps in the kernel on one word, which changes with every event (a
/// shared futex). Writes of the owner before `publish` are visible after the `wait` that it ends.
class Generations {
 public:
  /// Bytes of memory for `count` counters. Zeroed memory is a set of counters at 0.
  static std::size_t bytes(std::size_t count) noexcept;

  /// `memory`: `bytes(count)` bytes at a multiple of 4 that outlive this object.
  Generations(void* memory, std::size_t count);

  enum class Outcome {
    kReached,      // the counter has at least the value that was asked for
    kClosed,       // it has not, and the owner will raise no counter any more
    kInterrupted,  // it has not, and `interrupt` was called in this process
    kSignal,       // it has not, and a signal handler is to run
  };

  // The owner.

  /// Raise counter `index` to `value`. Throws std::out_of_range for a counter that there is not, as all do.
  void publish(std::size_t index, std::uint32_t value);
  /// Like `publish`, for one of several counters that change together: no process wakes before the next
  /// event.
  void store(std::size_t index, std::uint32_t value);
  /// Nothing will be published any more.
  void close() noexcept;

  // All processes.

  [[nodiscard]] std::uint32_t value(std::size_t index) const;
  [[nodiscard]] bool closed() const noexcept;
  /// Block until counter `index` has reached `at_least`, or that is not to be waited for.
  Outcome wait(std::size_t index, std::uint32_t at_least);
  /// End all waits of this object, those under way and those to come. For any thread.
  void interrupt() noexcept;

  // For waits that look at several counters, maybe of several owners:
  //   read `changes`, look at the counters, and if need be `wait_change`, again and again.

  /// A number that every event changes.
  [[nodiscard]] std::uint32_t changes() const noexcept;
  /// Block until `changes` is not `seen` any more, or a signal handler is to run, or for no reason.
  void wait_change(std::uint32_t seen) noexcept;
  /// An event that changes no counter: all who wait look again. For any thread.
  void poke() noexcept;

 private:
  using Word = std::atomic<std::uint32_t>;
  static_assert(Word::is_always_lock_free && sizeof(Word) == 4,
                "shared between processes, and by the kernel");

  void announce() noexcept;
  [[nodiscard]] Word& counter(std::size_t index) const;

  Word* _changes;   // counts events; everybody sleeps on it
  Word* _closed;    // 1: the owner has ended
  Word* _counters;  // [count]
  std::size_t _count;
  std::atomic<bool> _interrupted{false};
};

}  // namespace ds_slide
