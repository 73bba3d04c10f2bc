#include "memory/generations.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <stdexcept>
#include <string>

namespace ds_slide {
namespace {

constexpr std::size_t kHeader = 2;  // words before the counters

long futex(void* word, int operation, std::uint32_t value) noexcept {
  return syscall(SYS_futex, word, operation, value, nullptr, nullptr, 0);
}

}  // namespace

std::size_t Generations::bytes(std::size_t count) noexcept { return (kHeader + count) * sizeof(Word); }

Generations::Generations(void* memory, std::size_t count)
    : _changes(static_cast<Word*>(memory)),
      _closed(_changes + 1),
      _counters(_changes + kHeader),
      _count(count) {
  if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % alignof(Word) != 0) {
    throw std::invalid_argument("the counters need memory at a multiple of 4");
  }
}

Generations::Word& Generations::counter(std::size_t index) const {
  if (index >= _count) {
    throw std::out_of_range("there are " + std::to_string(_count) + " counters, and none has number " +
                            std::to_string(index));
  }
  return _counters[index];
}

void Generations::announce() noexcept {
  // Changed before the wake: who has read the old value and not slept yet does not fall asleep on it.
  _changes->fetch_add(1);
  futex(_changes, FUTEX_WAKE, INT_MAX);
}

void Generations::publish(std::size_t index, std::uint32_t value) {
  counter(index).store(value);
  announce();
}

void Generations::store(std::size_t index, std::uint32_t value) { counter(index).store(value); }

void Generations::close() noexcept {
  _closed->store(1);
  announce();
}

void Generations::interrupt() noexcept {
  _interrupted.store(true);
  announce();  // the waits of other processes wake up too, look, and sleep again
}

std::uint32_t Generations::changes() const noexcept { return _changes->load(); }

void Generations::wait_change(std::uint32_t seen) noexcept {
  if (_changes->load() == seen) futex(_changes, FUTEX_WAIT, seen);
}

void Generations::poke() noexcept { announce(); }

std::uint32_t Generations::value(std::size_t index) const { return counter(index).load(); }

bool Generations::closed() const noexcept { return _closed->load() != 0; }

Generations::Outcome Generations::wait(std::size_t index, std::uint32_t at_least) {
  Word const& counter = this->counter(index);
  for (;;) {
    // Read before the conditions: an event after it makes the kernel refuse to sleep.
    std::uint32_t const seen = _changes->load();
    bool const closed = _closed->load() != 0;  // before the counter: what was published before the end counts
    if (counter.load() >= at_least) return Outcome::kReached;
    if (_interrupted.load()) return Outcome::kInterrupted;
    if (closed) return Outcome::kClosed;
    if (futex(_changes, FUTEX_WAIT, seen) != 0 && errno == EINTR) return Outcome::kSignal;
  }
}

}  // namespace ds_slide
