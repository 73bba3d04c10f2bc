#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace ds_slide {

/// Whether reads or writes go to the device next. While both wait they take turns: request by request, or in
/// bursts. Which of the two is faster differs from disk to disk and is measured on the traffic itself: three
/// trials of each in the order A B B A A B, so that a slow drift of the device favours neither; then the
/// faster one is kept for a while, each time for twice as long.
///
/// Virtual disks of one kind of machine: 4.1 GB/s request by request and 4.5 in bursts on one, 2.8 and 2.3 on
/// another (requests of 1 MiB, 128 of them at the device).
///
/// Not thread-safe: the I/O engine calls it with its lock held.
class Turns {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::int64_t kBurstBytes = std::int64_t{256} << 20;
  static constexpr std::int64_t kTrialBytes = std::int64_t{1} << 30;
  /// At the beginning of a trial the device is still busy with what the one before has left.
  static constexpr std::int64_t kSettleBytes = std::int64_t{256} << 20;
  static constexpr std::int64_t kFirstHoldBytes = std::int64_t{64} << 30;
  static constexpr std::int64_t kLongestHoldBytes = std::int64_t{1} << 40;

  /// `burst_bytes`: always bursts of this length, 0 is request by request; nothing is what is faster.
  explicit Turns(std::optional<std::int64_t> burst_bytes)
      : _measures(!burst_bytes.has_value()), _burst_bytes(burst_bytes.value_or(kChoices[kOrder[0]])) {}

  /// True for a write. Where only one kind waits it is that one.
  bool writes_next(bool reads_wait, bool writes_wait) {
    bool const current_waits = _writing ? writes_wait : reads_wait;
    bool const other_waits = _writing ? reads_wait : writes_wait;
    bool const turn_goes_on = _burst == 0 || _burst < _burst_bytes;
    if (!other_waits || (turn_goes_on && current_waits)) return _writing;
    _burst = 0;
    return _writing = !_writing;
  }

  /// `nbytes` of the kind chosen last went to the device.
  void started(std::int64_t nbytes) { _burst += nbytes; }

  /// `nbytes` of any kind were moved by `now`. The clock of a trial runs while `both_wait`: only then do
  /// turns matter.
  void finished(std::int64_t nbytes, Clock::time_point now, bool both_wait) {
    if (!_measures) return;
    bool const ran = _running;
    Clock::time_point const before = _last;
    _running = both_wait;
    _last = now;
    if (!ran) return;
    if (_hold_left > 0) {
      _hold_left -= nbytes;
      if (_hold_left <= 0) begin_trial(0);
    } else if (_settled < kSettleBytes) {
      _settled += nbytes;
    } else {
      _moved += nbytes;
      _seconds[kOrder[_trial]] += std::chrono::duration<double>(now - before).count();
      if (_moved >= kTrialBytes) end_trial();
    }
  }

  [[nodiscard]] std::int64_t burst_bytes() const { return _burst_bytes; }

 private:
  static constexpr std::array<std::int64_t, 2> kChoices{0, kBurstBytes};
  static constexpr std::array<std::size_t, 6> kOrder{0, 1, 1, 0, 0, 1};

  void begin_trial(std::size_t number) {
    if (number == 0) _seconds = {0.0, 0.0};
    _trial = number;
    _settled = _moved = 0;
    _burst_bytes = kChoices[kOrder[number]];
  }

  void end_trial() {
    if (_trial + 1 < kOrder.size()) {
      begin_trial(_trial + 1);
      return;
    }
    // As many bytes were moved in the trials of each.
    _burst_bytes = kChoices[_seconds[1] < _seconds[0] ? 1 : 0];
    _hold_left = _next_hold;
    _next_hold = std::min(2 * _next_hold, kLongestHoldBytes);
  }

  bool _measures;
  std::int64_t _burst_bytes;
  bool _writing = false;    // the kind of which a burst is under way
  std::int64_t _burst = 0;  // its bytes so far

  std::size_t _trial = 0;
  std::int64_t _settled = 0, _moved = 0;
  std::array<double, 2> _seconds{0.0, 0.0};
  std::int64_t _hold_left = 0, _next_hold = kFirstHoldBytes;
  bool _running = false;
  Clock::time_point _last{};
};

}  // namespace ds_slide
