#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "io/trials.hpp"

namespace ds_slide {

/// How requests go to the device: whether reads or writes are next, and how many may be there at once. Both
/// are measured unless they are given.
///
/// While reads and writes both wait they take turns, request by request or in bursts. Which is faster differs
/// from disk to disk; virtual disks of one kind of machine gave 4.1 GB/s request by request and 4.5 in
/// bursts, 2.8 and 2.3, 2.3 and 2.4 (requests of 1 MiB, 128 of them at the device).
///
/// A request waits for earlier requests at the device: depth * request / bandwidth seconds, 25 ms for 32
/// requests of 2 MiB at 2.5 GB/s and four times longer for 128. So the lower of two depths is used unless the
/// higher moves more bytes.
///
/// Not thread-safe: the I/O engine calls it with its lock held.
class Turns {
 public:
  using Clock = Trials::Clock;
  static constexpr std::int64_t kBurstBytes = std::int64_t{256} << 20;
  /// By how much the higher depth must be faster. Trials of one way differ by a few percent.
  static constexpr double kDeeper = 1.05;

  /// `burst_bytes`: always bursts of this length, 0 is request by request; nothing is what is faster.
  /// `depth`: requests at the device; with `low_depth` that many, unless `depth` of them are faster.
  Turns(std::optional<std::int64_t> burst_bytes, std::int64_t depth, std::optional<std::int64_t> low_depth)
      : _ways(all_ways(burst_bytes, depth, low_depth)), _trials(handicaps(_ways)) {}

  /// True for a write. Where only one kind waits it is that one.
  bool writes_next(bool reads_wait, bool writes_wait) {
    bool const current_waits = _writing ? writes_wait : reads_wait;
    bool const other_waits = _writing ? reads_wait : writes_wait;
    bool const turn_goes_on = _burst == 0 || _burst < burst_bytes();
    if (!other_waits || (turn_goes_on && current_waits)) return _writing;
    _burst = 0;
    return _writing = !_writing;
  }

  /// `nbytes` of the kind chosen last went to the device.
  void started(std::int64_t nbytes) { _burst += nbytes; }

  /// `nbytes` of any kind were moved by `now`. The clock of a trial runs while `both_wait`: only then do
  /// turns and depth matter.
  void finished(std::int64_t nbytes, Clock::time_point now, bool both_wait) {
    _trials.finished(nbytes, now, both_wait);
  }

  [[nodiscard]] std::int64_t burst_bytes() const { return _ways[_trials.way()].burst_bytes; }
  [[nodiscard]] std::int64_t depth() const { return _ways[_trials.way()].depth; }

 private:
  struct Way {
    std::int64_t burst_bytes, depth;
  };

  static std::vector<Way> all_ways(std::optional<std::int64_t> burst_bytes, std::int64_t depth,
                                   std::optional<std::int64_t> low_depth) {
    std::vector<Way> ways;
    for (std::int64_t const each : {low_depth.value_or(depth), depth}) {
      if (!ways.empty() && each == ways.front().depth) break;
      ways.push_back({burst_bytes.value_or(0), each});
      if (!burst_bytes) ways.push_back({kBurstBytes, each});
    }
    return ways;
  }

  static std::vector<double> handicaps(std::vector<Way> const& ways) {
    std::vector<double> result;
    result.reserve(ways.size());
    for (Way const& way : ways) result.push_back(way.depth > ways.front().depth ? kDeeper : 1.0);
    return result;
  }

  std::vector<Way> _ways;
  Trials _trials;           // of `_ways`
  bool _writing = false;    // the kind of which a burst is under way
  std::int64_t _burst = 0;  // its bytes so far
};

}  // namespace ds_slide
