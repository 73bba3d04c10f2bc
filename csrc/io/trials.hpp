#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ds_slide {

/// Which of several ways to use a device moves bytes fastest, measured on the traffic itself.
///
/// Each way has a trial of kTrialBytes in every round, and every second round runs backwards (A B, B A, A B),
/// so that a slow drift of the device favours none. The best is kept for a while, each time for twice as
/// long, and all are tried again.
///
/// Not thread-safe: the I/O engine calls it with its lock held.
class Trials {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kRounds = 3;
  static constexpr std::int64_t kTrialBytes = std::int64_t{1} << 30;
  /// At the beginning of a trial the device is still busy with what the one before has left.
  static constexpr std::int64_t kSettleBytes = std::int64_t{256} << 20;
  static constexpr std::int64_t kFirstHoldBytes = std::int64_t{64} << 30;
  static constexpr std::int64_t kLongestHoldBytes = std::int64_t{1} << 40;

  /// One factor on the time of each way. A way with a factor above 1 has to be faster by that factor.
  explicit Trials(std::vector<double> handicaps)
      : _handicaps(std::move(handicaps)), _seconds(_handicaps.size()) {}

  /// The way to use now.
  [[nodiscard]] std::size_t way() const { return _way; }

  /// `nbytes` were moved by `now`. The clock runs from one call to the next if the first `counts`.
  void finished(std::int64_t nbytes, Clock::time_point now, bool counts) {
    if (_seconds.size() < 2) return;
    bool const ran = std::exchange(_running, counts);
    Clock::time_point const before = std::exchange(_last, now);
    if (!ran) return;
    if (_hold_left > 0) {
      _hold_left -= nbytes;
      if (_hold_left <= 0) begin_trial(0);
    } else if (_settled < kSettleBytes) {
      _settled += nbytes;
    } else {
      _moved += nbytes;
      _seconds[_way] += std::chrono::duration<double>(now - before).count();
      if (_moved >= kTrialBytes) end_trial();
    }
  }

 private:
  void begin_trial(std::size_t number) {
    std::size_t const ways = _seconds.size(), round = number / ways, place = number % ways;
    if (number == 0) std::fill(_seconds.begin(), _seconds.end(), 0.0);
    _trial = number;
    _settled = _moved = 0;
    _way = round % 2 == 0 ? place : ways - 1 - place;
  }

  void end_trial() {
    std::size_t const ways = _seconds.size();
    if (_trial + 1 < kRounds * ways) {
      begin_trial(_trial + 1);
      return;
    }
    // The trials of all ways moved the same number of bytes.
    _way = 0;
    for (std::size_t other = 1; other < ways; ++other) {
      if (_seconds[other] * _handicaps[other] < _seconds[_way] * _handicaps[_way]) _way = other;
    }
    _hold_left = _next_hold;
    _next_hold = std::min(2 * _next_hold, kLongestHoldBytes);
  }

  std::vector<double> _handicaps;
  std::vector<double> _seconds;  // of all trials of a way
  std::size_t _way = 0;
  std::size_t _trial = 0;
  std::int64_t _settled = 0, _moved = 0;
  std::int64_t _hold_left = 0, _next_hold = kFirstHoldBytes;
  bool _running = false;
  Clock::time_point _last{};
};

}  // namespace ds_slide
