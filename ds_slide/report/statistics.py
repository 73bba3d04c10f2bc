"""What each lane did in a step, the bound that follows from it, and which lane set it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from ds_slide.report import chrome
from ds_slide.report.trace import UNLABELLED, Clock, ComputeTrace, Label, LaneTrace, Marker, Requests, Trace
from ds_slide.report.waits import Waits

OUTER_H2D = "h2d of outer modules"
"""Copies up beside those of the blocks, on a stream of their own; statistics count them under "h2d"."""
INPUTS = "inputs of blocks"
"""Copies of inputs of recomputed blocks to host memory and back, on one stream; as many bytes go down as come up again,
and statistics count a half of them under "d2h" and one under "h2d"."""
UPDATE = "update"
STREAM_LANES = ("h2d", OUTER_H2D, "d2h", INPUTS, UPDATE)
"""The lanes that have a meter of their own. Of the update's busy seconds "holding_s" went to gradients that wait for
the step: those of later micro-batches are added to them as they arrive, and no forward waits for that."""
SSD = "ssd"
"""The lane of runs with an SSD tier; reads and writes share the disk, so they are one lane."""
SSD_TOTALS = ("read_bytes", "written_bytes", "busy_s", "checked_bytes", "checked_s")
"""Totals of the store since its start; the last two where it keeps checksums."""
SECONDS_A_DAY = 86_400


class Streams(Protocol):
    """Where the points of a device's work come from (`runtime.device.Device`)."""

    def stream(self) -> Any: ...

    def mark(self, stream: Any = None, *, timed: bool = False) -> Any: ...


class LaneMeter:
    """Busy seconds and bytes of one lane. Device intervals are read when they have passed, never waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[tuple[Marker, Marker, int, Label]] = deque()
        self._seconds = 0.0
        self._holding = 0.0
        self.taken_holding = 0.0
        """Of the busy seconds that `take` has returned last, those that went to gradients that wait for the step; for
        the thread that calls it."""
        self._bytes = 0
        self._trace: LaneTrace | None = None

    def add_span(
        self, begin: float, end: float, moved: int = 0, label: Label = UNLABELLED, *, holds: bool = False
    ) -> None:
        """Work of the host, in seconds of `time.perf_counter`. `holds`: of a gradient that waits for the step, which
        `taken_holding` tells apart."""
        with self._lock:
            self._seconds += end - begin
            self._holding += end - begin if holds else 0.0
            self._bytes += moved
            if self._trace is not None:
                self._trace.add_span(begin, end, moved, label)

    def add_pause(self, begin: float, end: float) -> None:
        """A wait inside of the span that is added next, which does not count."""
        with self._lock:
            self._seconds -= end - begin
            if self._trace is not None:
                self._trace.add_pause(begin, end)

    def add_interval(self, start: Marker, end: Marker, moved: int = 0, label: Label = UNLABELLED) -> None:
        with self._lock:
            self._pending.append((start, end, moved, label))
            self._bytes += moved
            self._collect()  # here too: inference takes no steps

    @property
    def is_traced(self) -> bool:
        """Whether steps are recorded at this moment."""
        return self._trace is not None

    def add_stream_wait(self, begin: Marker, end: Marker, what: str) -> None:
        """For the trace alone: the lane's stream has waited for `what`, and has done nothing else between two markers
        with times."""
        with self._lock:
            if self._trace is not None:
                self._trace.add_stream_wait(begin, end, what)

    def named(self, label: Label) -> AbstractContextManager[None]:
        """Names the work inside for a profiler while steps are recorded."""
        trace = self._trace
        return nullcontext() if trace is None else trace.named(label)

    def _collect(self) -> None:
        while self._pending and self._pending[0][1].done():
            start, end, moved, label = self._pending.popleft()
            self._seconds += start.seconds_until(end)
            if self._trace is not None:
                self._trace.add_interval(start, end, moved, label)

    def take(self) -> tuple[float, int]:
        """Busy seconds and bytes since the last call. An interval still under way counts in the next call."""
        with self._lock:
            self._collect()
            taken = (self._seconds, self._bytes)
            self.taken_holding = self._holding
            self._seconds, self._holding, self._bytes = 0.0, 0.0, 0
            if self._trace is not None:
                self._trace.cut()
            return taken

    def set_trace(self, trace: LaneTrace) -> None:
        """Record there what is counted from now on."""
        with self._lock:
            self._trace = trace

    def end_trace(self) -> None:
        """Record no more, once the device has done what it has been given; the script waits for that here."""
        with self._lock:
            under_way = [end for _, end, _, _ in self._pending]
        for end in under_way:  # without the lock: the lane may go on
            end.synchronize()
        with self._lock:
            self._collect()
            if self._trace is not None:
                self._trace.end()
            self._trace = None


@dataclass(frozen=True)
class StepStatistics:
    """One step: wall time, the time of the busiest lane (the bound T*), and that lane's name. Seconds and bytes."""

    step: int
    step_s: float
    bound_s: float
    bound_lane: str
    lanes: dict[str, dict[str, float | int]]
    ssd: dict[str, Any]
    """Bytes read, written and checked in this step, seconds of the threads that asked for checks (beside the disk, not
    in its way), terabytes written a day at this rate, and the store's settings; empty without an SSD tier."""

    @property
    def efficiency(self) -> float:
        return self.bound_s / self.step_s if self.step_s > 0 else 0.0


class StepRecorder:
    """Statistics of the lanes for every optimizer step, taken when the step ends.

    The compute lane is busy when it is not waiting for another lane: its time is the step's wall time
    less the measured waits (`stall`). Whatever the host loses between kernels therefore counts as compute.
    """

    def __init__(self, device: Streams, waits: Waits, trace: Trace | None = None, *, rank: int = 0) -> None:
        """A recorder that has counted nothing. `waits`: of the engine's threads. `trace`: of chosen steps, and `rank`,
        which its file names."""
        self._device = device
        self._waits = waits
        self.meters = {lane: LaneMeter() for lane in STREAM_LANES}
        self.stall = LaneMeter()
        self.requests = Requests()
        self.compute: ComputeTrace | None = None
        """Where to note what the compute stream begins and ends; None outside of the steps that are recorded."""
        self._trace, self._rank = trace, rank
        self._clock: Clock | None = None
        self._last_end: float | None = None
        self._ssd: Callable[[], dict[str, Any]] | None = None
        self._ssd_before: dict[str, Any] = {}
        self.latest: StepStatistics | None = None

    @contextmanager
    def stalled(self, what: str) -> Iterator[None]:
        """The calling thread's stream, on which it computes, waits inside for `what`; nothing else is submitted."""
        before = self._device.mark(timed=True)
        yield
        self.stall.add_interval(before, self._device.mark(timed=True), label=(what, -1))

    def watch_ssd(self, statistics: Callable[[], dict[str, Any]]) -> None:
        """Count the disk, too. `statistics`: totals of the store since its start (read_bytes, written_bytes, busy_s,
        and settings)."""
        self._ssd = statistics
        self._ssd_before = statistics()

    def _ssd_step(self, wall: float) -> dict[str, Any]:
        if self._ssd is None:
            return {}
        before, now = self._ssd_before, self._ssd()
        self._ssd_before = now
        step = {**now, **{key: now[key] - before[key] for key in SSD_TOTALS if key in now}}
        step["written_total_bytes"] = now["written_bytes"]
        step["written_tb_per_day"] = step["written_bytes"] / wall * SECONDS_A_DAY / 1e12 if wall > 0 else 0.0
        return step

    def end_step(self, step: int) -> StepStatistics | None:
        now = time.perf_counter()
        previous, self._last_end = self._last_end, now
        if self._trace is not None and step == self._trace.request.first - 1:
            self._begin_trace(self._trace)
        taken = {lane: meter.take() for lane, meter in self.meters.items()}
        stalled, _ = self.stall.take()
        statistics = self._statistics(step, now, previous, taken, stalled)
        if self.compute is not None:
            self._end_traced_step(step, now)
        return statistics

    def _statistics(
        self, step: int, now: float, previous: float | None, taken: dict[str, tuple[float, int]], stalled: float
    ) -> StepStatistics | None:
        wall = 0.0 if previous is None else now - previous
        ssd = self._ssd_step(wall)
        if previous is None:
            return None
        lanes: dict[str, dict[str, float | int]] = {"compute": {"busy_s": max(0.0, wall - stalled), "bytes": 0}}
        outer_seconds, outer_bytes = taken.pop(OUTER_H2D)
        inputs_seconds, inputs_bytes = taken.pop(INPUTS)
        for lane, (seconds, moved) in taken.items():
            lanes[lane] = {"busy_s": seconds, "bytes": moved}
        lanes[UPDATE]["holding_s"] = self.meters[UPDATE].taken_holding
        for lane, seconds, moved in (("h2d", outer_seconds, outer_bytes), ("d2h", 0.0, 0)):
            lanes[lane]["busy_s"] += seconds + inputs_seconds / 2
            lanes[lane]["bytes"] += moved + inputs_bytes // 2
        if ssd:
            lanes[SSD] = {"busy_s": ssd["busy_s"], "bytes": ssd["read_bytes"] + ssd["written_bytes"]}
        bound_lane = max(lanes, key=lambda lane: lanes[lane]["busy_s"])
        bound = min(wall, float(lanes[bound_lane]["busy_s"]))
        self.latest = StepStatistics(step, wall, bound, bound_lane, lanes, ssd)
        return self.latest

    def _begin_trace(self, trace: Trace) -> None:
        """Begin the trace before the meters are read: what they count after that is of the first chosen step."""
        # On a stream of its own, on which nothing is before it: passed at once, and nobody waits.
        self._clock = Clock(self._device.mark(self._device.stream(), timed=True), time.perf_counter())
        for lane, meter in self.meters.items():
            meter.set_trace(trace.lanes[lane])
        self.stall.set_trace(trace.stall)
        self._waits.is_recording = True
        self.requests.set_trace(trace.requests)
        self.compute = trace.compute

    def _end_traced_step(self, step: int, now: float) -> None:
        trace = self._trace
        assert trace is not None and self.compute is not None
        self.requests.cut()
        self.compute.cut()
        if step < trace.request.first:
            trace.begin(now)
            return
        trace.end_step(now, self.as_dict({}))
        if step == trace.request.last:
            self.close()

    def close(self) -> None:
        """Write what has been recorded and record no more. Harmless when called twice."""
        trace, self._trace, self.compute = self._trace, None, None
        if trace is None:
            return
        for meter in (*self.meters.values(), self.stall):
            meter.end_trace()
        self.requests.set_trace(None)
        clock = self._clock or Clock(self._device.mark(timed=True), time.perf_counter())
        chrome.write(trace, clock, self._waits, rank=self._rank)

    def as_dict(self, memory: dict[str, int]) -> dict[str, Any]:
        """The newest finished step in the form of `engine.optimizer.slide_stats()`; empty before the first."""
        if self.latest is None:
            return {}
        stats = self.latest
        return {
            "step": stats.step,
            "step_s": stats.step_s,
            "bound_s": stats.bound_s,
            "bound_lane": stats.bound_lane,
            "efficiency": stats.efficiency,
            "lanes": stats.lanes,
            "ssd": dict(stats.ssd),
            "memory": dict(memory),
        }
