"""The work of each lane in a step, the bound that follows from it, and the lane that sets the bound."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from ds_slide.report import chrome
from ds_slide.report.host import HostTrace
from ds_slide.report.trace import UNLABELLED, Clock, ComputeTrace, Label, LaneTrace, Marker, Requests, Trace
from ds_slide.report.waits import Waits

OUTER_H2D = "h2d of outer modules"
"""Copies of outer modules to the GPU, on a stream of their own; statistics count them under "h2d"."""
INPUTS = "inputs of blocks"
"""Copies of inputs of recomputed blocks to host memory and back, on one stream. The same bytes go down and come up
again; statistics count one half under "d2h" and one under "h2d"."""
UPDATE = "update"
PRODUCTS = "products"
"""Products of whole matrices (Muon) on a stream of their own. Other trainings have no such lane."""
STREAM_LANES = ("h2d", OUTER_H2D, "d2h", INPUTS, UPDATE, PRODUCTS)
"""The lanes with a meter of their own. "holding_s" is the part of the update lane's busy seconds for gradients that
wait for the step: gradients of later micro-batches are added to them on arrival, and no forward waits for that."""
SSD = "ssd"
"""The lane of the disk; reads and writes share the disk, so they are one lane."""
SSD_TOTALS = ("read_bytes", "written_bytes", "busy_s", "checked_bytes", "checked_s")
"""Totals of the store since its start; the last two only with checksums."""


class Streams(Protocol):
    """Makes the markers in a device's work (`runtime.core.device.Device`)."""

    def stream(self) -> Any: ...

    def mark(self, stream: Any = None, *, timed: bool = False) -> Any: ...


class LaneMeter:
    """Busy seconds and bytes of one lane. Device intervals are read when they have passed, and never waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[tuple[Marker, Marker, int, Label]] = deque()
        self._seconds = 0.0
        self._holding = 0.0
        self.taken_holding = 0.0
        """The part of the busy seconds of the last `take` for gradients that wait for the step. Only the thread that
        calls `take` reads it."""
        self._bytes = 0
        self._trace: LaneTrace | None = None

    def add_span(
        self, begin: float, end: float, moved: int = 0, label: Label = UNLABELLED, *, holds: bool = False
    ) -> None:
        """Count work of the host, in seconds of `time.perf_counter`. `holds`: the work is for a gradient that waits for
        the step; `taken_holding` counts it apart."""
        with self._lock:
            self._seconds += end - begin
            self._holding += end - begin if holds else 0.0
            self._bytes += moved
            if self._trace is not None:
                self._trace.add_span(begin, end, moved, label)

    def add_pause(self, begin: float, end: float) -> None:
        """Leave out a wait inside of the span that is added next."""
        with self._lock:
            self._seconds -= end - begin
            if self._trace is not None:
                self._trace.add_pause(begin, end)

    def add_interval(self, start: Marker, end: Marker, moved: int = 0, label: Label = UNLABELLED) -> None:
        with self._lock:
            self._pending.append((start, end, moved, label))
            self._bytes += moved
            self._collect()  # here too, because inference takes no steps

    @property
    def is_traced(self) -> bool:
        """Whether steps are recorded at this moment."""
        return self._trace is not None

    def add_stream_wait(self, begin: Marker, end: Marker, what: str) -> None:
        """Note for the trace only that the lane's stream has waited for `what`, and has done nothing else between two
        markers with times."""
        with self._lock:
            if self._trace is not None:
                self._trace.add_stream_wait(begin, end, what)

    def named(self, label: Label) -> AbstractContextManager[None]:
        """Name the work inside for a profiler while steps are recorded."""
        trace = self._trace
        return nullcontext() if trace is None else trace.named(label)

    def _collect(self) -> None:
        while self._pending and self._pending[0][1].done():
            start, end, moved, label = self._pending.popleft()
            self._seconds += start.seconds_until(end)
            if self._trace is not None:
                self._trace.add_interval(start, end, moved, label)

    def take(self) -> tuple[float, int]:
        """Return busy seconds and bytes since the last call. An interval still under way counts in the next call."""
        with self._lock:
            self._collect()
            taken = (self._seconds, self._bytes)
            self.taken_holding = self._holding
            self._seconds, self._holding, self._bytes = 0.0, 0.0, 0
            if self._trace is not None:
                self._trace.cut()
            return taken

    def set_trace(self, trace: LaneTrace) -> None:
        """Record in `trace` all that is counted from now on."""
        with self._lock:
            self._trace = trace

    def end_trace(self) -> None:
        """Stop recording, once the device has done the work under way; the script waits for that here."""
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
    """One step: wall time, the busy time of the busiest lane (the bound T*), and its name. Seconds and bytes."""

    step: int
    step_s: float
    bound_s: float
    bound_lane: str
    lanes: dict[str, dict[str, float | int]]
    ssd: dict[str, Any]
    """Bytes read, written and checked in this step, and seconds of checks in the threads that asked, beside the disk's
    work. Also terabytes written a day at this rate, and the store's settings. It is empty without an SSD tier."""

    @property
    def efficiency(self) -> float:
        return self.bound_s / self.step_s if self.step_s > 0 else 0.0


class CountingStore(Protocol):
    """The part of an SSD store that counts."""

    def statistics(self) -> dict[str, Any]:
        """Return totals since its start (read_bytes, written_bytes, busy_s), and settings."""
        ...


class StepRecorder:
    """Statistics of the lanes for every optimizer step, taken when the step ends.

    The compute lane is busy when it is not waiting for another lane: its time is the step's wall time less the measured
    waits (`stall`). Time that the host loses between kernels therefore counts as compute.
    """

    def __init__(self, device: Streams, waits: Waits, trace: Trace | None = None, *, rank: int = 0) -> None:
        """Make a recorder that has counted nothing. `waits`: waits of the engine's threads. `trace`: records chosen
        steps. `rank`: the trace's file names it."""
        self._device = device
        self._waits = waits
        self.meters = {lane: LaneMeter() for lane in STREAM_LANES}
        self.stall = LaneMeter()
        self.requests = Requests()
        self.compute: ComputeTrace | None = None
        """Notes what the compute stream begins and ends; None outside of recorded steps."""
        self.host: HostTrace | None = None
        """Measures what blocks cost the host; None outside of recorded steps."""
        self._trace, self._rank = trace, rank
        self._clock: Clock | None = None
        self._last_end: float | None = None
        self._ssd: CountingStore | None = None
        self._ssd_before: dict[str, Any] = {}
        self.latest: StepStatistics | None = None

    @contextmanager
    def stalled(self, what: str) -> Iterator[None]:
        """Measure a wait of the calling thread's compute stream for `what`. Nothing else is submitted inside."""
        before = self._device.mark(timed=True)
        yield
        self.stall.add_interval(before, self._device.mark(timed=True), label=(what, -1))

    def watch_ssd(self, store: CountingStore) -> None:
        """Count the disk, too."""
        self._ssd = store
        self._ssd_before = store.statistics()

    def _ssd_step(self, wall: float) -> dict[str, Any]:
        if self._ssd is None:
            return {}
        before, now = self._ssd_before, self._ssd.statistics()
        self._ssd_before = now
        step = {**now, **{key: now[key] - before[key] for key in SSD_TOTALS if key in now}}
        step["written_total_bytes"] = now["written_bytes"]
        step["written_tb_per_day"] = step["written_bytes"] / wall * 86_400 / 1e12 if wall > 0 else 0.0
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
        if not taken[PRODUCTS][0]:
            del taken[PRODUCTS]
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
        """Begin the trace before the meters are read: they then count only the first chosen step."""
        # The marker is on an empty stream of its own: it is passed at once, without a wait.
        self._clock = Clock(self._device.mark(self._device.stream(), timed=True), time.perf_counter())
        for lane, traced in trace.lanes.items():
            self.meters[lane].set_trace(traced)
        self.stall.set_trace(trace.stall)
        self._waits.is_recording = True
        self.requests.set_trace(trace.requests)
        self.compute, self.host = trace.compute, trace.host

    def _end_traced_step(self, step: int, now: float) -> None:
        trace = self._trace
        assert trace is not None and self.compute is not None and self.host is not None
        self.requests.cut()
        self.compute.cut()
        self.host.cut()
        if step < trace.request.first:
            trace.begin(now)
            return
        trace.end_step(now, self.as_dict({}))
        if step == trace.request.last:
            self.close()

    def close(self) -> None:
        """Write the recorded steps and stop recording. Harmless when called twice."""
        trace, self._trace, self.compute, self.host = self._trace, None, None, None
        if trace is None:
            return
        for meter in (*self.meters.values(), self.stall):
            meter.end_trace()
        self.requests.set_trace(None)
        clock = self._clock or Clock(self._device.mark(timed=True), time.perf_counter())
        chrome.write(trace, clock, self._waits, rank=self._rank)

    def as_dict(self, memory: dict[str, int]) -> dict[str, Any]:
        """Return the newest finished step in the form of `engine.optimizer.slide_stats()`; empty before the first."""
        if self.latest is None:
            return {}
        latest, own = self.latest, {"ssd": dict(self.latest.ssd), "memory": dict(memory)}
        return {**vars(latest), "efficiency": latest.efficiency, **own}
