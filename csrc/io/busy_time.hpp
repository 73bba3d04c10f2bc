#pragma once

#include <chrono>
#include <cstdint>

namespace ds_slide {

/// Wall time during which at least one of several overlapping things is under way.
class BusyTime {
 public:
  using Clock = std::chrono::steady_clock;

  void started(Clock::time_point now) noexcept {
    if (_count++ == 0) _since = now;
  }
  void stopped(Clock::time_point now) noexcept {
    if (--_count == 0) _total += now - _since;
  }
  [[nodiscard]] double seconds(Clock::time_point now) const noexcept {
    Clock::duration const total = _count > 0 ? _total + (now - _since) : _total;
    return std::chrono::duration<double>(total).count();
  }

 private:
  std::int64_t _count = 0;
  Clock::time_point _since{};
  Clock::duration _total{};
};

}  // namespace ds_slide
