"""The work and the waits of every lane in chosen steps; written as a Chrome trace (`ds_slide.report.chrome`).

Nothing is recorded outside of the chosen steps, and no thread waits for the device inside of them. Lanes hand over the
markers that their statistics are read from. The markers become seconds when the last step has ended.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ds_slide.report.host import HostTrace
from ds_slide.report.waits import THREAD_PREFIX, NoRanges, Ranges, Waits

Label = tuple[str, int]
"""(what is done, index of the unit among the engine's units)"""
UNLABELLED: Label = ("", -1)
NO_RANGES = NoRanges()
BETWEEN = "outside of the blocks"
"""Work of the compute lane that is no forward or backward of a block: the outer modules, the loss, the script."""
COMPUTE, REQUESTS = "compute", "ssd"


class Marker(Protocol):
    """A point in the work of a stream (`runtime.device.Marker`), recorded with a time."""

    def done(self) -> bool: ...

    def synchronize(self) -> None: ...

    def seconds_until(self, later: Any) -> float:
        """Device seconds between two points that have been passed."""


@dataclass(frozen=True)
class TraceRequest:
    """The recorded steps of an engine, counted from 1 like `slide_stats()["step"]`, and the file that they go to."""

    path: Path
    first: int
    last: int

    def of_rank(self, rank: int, world_size: int) -> TraceRequest:
        """Return the request of one rank. Each of several ranks has its own file: "step.json" becomes
        "step.rank1.json"."""
        if world_size == 1:
            return self
        return TraceRequest(self.path.with_suffix(f".rank{rank}{self.path.suffix}"), self.first, self.last)


@dataclass(frozen=True)
class Event:
    """One piece of work of one lane. `begin`, `end`: seconds from the begin of the step that counts it. Work that was
    under way at that time has a negative begin."""

    step: int
    lane: str
    what: str
    unit: str
    begin: float
    end: float
    nbytes: int


@dataclass(frozen=True)
class Wait:
    """One wait, cut at the begin and the end of its step, in seconds from the step's begin."""

    step: int
    row: str
    """The row in the picture. A lane may wait on its stream while its thread waits for something else: two rows."""
    waiter: str
    """A lane, or a thread of the script."""
    what: str
    """What the waiter waited for, as the end of a sentence."""
    kept_by: str
    """The thread that brings it about, mostly a lane; empty where it is not known."""
    during: str
    """What the compute stream was in, for a wait of the compute stream."""
    of_script: bool
    """Whether a thread of the script waits, and none of the engine's."""
    begin: float
    end: float


class _Raw(NamedTuple):
    """`begin`, `end`: markers, or seconds of `time.perf_counter`. A tuple takes a third of a dataclass's time."""

    label: Label
    begin: Marker | float
    end: Marker | float
    nbytes: int = 0


class LaneTrace:
    """All that one meter has counted, step by step. The meter calls it and holds its own lock."""

    def __init__(self, units: Sequence[str] = (), ranges: Ranges = NO_RANGES) -> None:
        self._units, self._ranges = units, ranges
        self.stream_waits: list[_Raw] = []
        self._open: list[_Raw] = []
        self._pauses: list[tuple[float, float]] = []
        self.steps: list[list[_Raw]] = []

    def add_interval(self, begin: Marker, end: Marker, nbytes: int, label: Label) -> None:
        self._open.append(_Raw(label, begin, end, nbytes))

    def add_pause(self, begin: float, end: float) -> None:
        """Leave out a time inside of the next span: it does not count as the lane's own."""
        self._pauses.append((begin, end))

    def add_span(self, begin: float, end: float, nbytes: int, label: Label) -> None:
        if not self._pauses:
            self._open.append(_Raw(label, begin, end, nbytes))
            return
        pauses, self._pauses = self._pauses, []
        for start, stop in _without(begin, end, pauses):
            self._open.append(_Raw(label, start, stop, nbytes))
            nbytes = 0  # the first part of a span with pauses has all bytes

    def add_stream_wait(self, begin: Marker, end: Marker, what: str) -> None:
        """Note that the lane's stream has waited for `what` between two markers."""
        self.stream_waits.append(_Raw((what, -1), begin, end))

    @contextmanager
    def named(self, label: Label) -> Iterator[None]:
        """Name the work inside for a profiler. Called without the meter's lock."""
        range_ = self._ranges.begin_range(_name(label, self._units))
        try:
            yield
        finally:
            self._ranges.end_range(range_)

    def cut(self) -> None:
        """End the step under way."""
        self.steps.append(self._open)
        self._open = []

    def end(self) -> None:
        """End the recording. Work that the device did late belongs to the last step."""
        if self.steps:
            self.steps[-1] += self._open


class ComputeTrace:
    """The begins and ends of blocks' forwards and backwards on the compute stream. The thread that computes calls it,
    one at a time; during a backward that is autograd's thread."""

    def __init__(self, units: Sequence[str] = (), ranges: Ranges = NO_RANGES) -> None:
        self._units, self._ranges = units, ranges
        self._named: dict[Label, Any] = {}
        self._inside: list[Label] = []
        self._open: list[tuple[Marker, Label]] = []
        self.steps: list[list[tuple[Marker, Label]]] = []

    def enter(self, label: Label, point: Marker) -> None:
        if label not in self._inside:  # a backward may be announced several times
            self._inside.append(label)
            self._open.append((point, label))
            self._named[label] = self._ranges.begin_range(_name(label, self._units))

    def leave(self, label: Label, point: Marker) -> None:
        """Leave `label`. The label that was entered before goes on, such as the backward around a recomputed
        forward."""
        if label in self._inside:
            self._inside.remove(label)
            self._ranges.end_range(self._named.pop(label))
            self._open.append((point, self._inside[-1] if self._inside else UNLABELLED))

    def cut(self) -> None:
        self.steps.append(self._open)
        self._open, self._inside = [], []  # a forward that an exception has ended is never left
        for range_ in self._named.values():
            self._ranges.end_range(range_)
        self._named = {}


class Requests:
    """Requests of the SSD tier, from their submission to the store until they are complete; several at a time."""

    def __init__(self) -> None:
        self.trace: LaneTrace | None = None
        self._lock = threading.Lock()

    def around(self, what: str, order: int, nbytes: int, then: Callable[[], None]) -> Callable[[], None]:
        """Return `then`. While steps are recorded, return a function that records the request and calls `then`."""
        if self.trace is None:
            return then
        begin = time.perf_counter()

        def complete() -> None:
            with self._lock:
                if self.trace is not None:
                    self.trace.add_span(begin, time.perf_counter(), nbytes, (what, order))
            then()

        return complete

    def cut(self) -> None:
        with self._lock:
            if self.trace is not None:
                self.trace.cut()

    def set_trace(self, trace: LaneTrace | None) -> None:
        with self._lock:
            self.trace = trace


@dataclass(frozen=True)
class Clock:
    """A marker and its time on the host. It turns other markers into seconds of `time.perf_counter`.

    The marker is recorded on an idle stream, so that it is passed within microseconds, and without a wait."""

    marker: Marker
    seconds: float

    def of(self, moment: Marker | float) -> float:
        return moment if isinstance(moment, float) else self.seconds + self.marker.seconds_until(moment)


class Trace:
    """The chosen steps of one engine. `units`: their names, in the engine's order."""

    def __init__(
        self, request: TraceRequest, units: Sequence[str], lanes: Iterable[str], ranges: Ranges = NO_RANGES
    ) -> None:
        self.request = request
        self.units = units
        self.lanes = {lane: LaneTrace(units, ranges) for lane in lanes}
        self.stall = LaneTrace()
        self.compute = ComputeTrace(units, ranges)
        self.host = HostTrace(units)
        self.requests = LaneTrace()
        self.statistics: list[dict[str, Any]] = []
        """Statistics of the steps that have ended, in the form of `slide_stats()`."""
        self._ranges = ranges
        self._range: Any = None
        self._ends: list[float] = []

    def begin(self, seconds: float) -> None:
        """Begin the first chosen step. Earlier counts of the meters are dropped: they belong to the step before."""
        self._ends = [seconds]
        for lane in (*self.lanes.values(), self.stall, self.requests):
            lane.steps.clear()
        self.compute.steps.clear()
        self.host.steps.clear()
        self._range = self._ranges.begin_range(f"step {self.request.first}")

    def end_step(self, seconds: float, statistics: dict[str, Any]) -> None:
        """End the step. `statistics`: of the step that ends, kept beside the events."""
        self._ends.append(seconds)
        self.statistics.append(statistics)
        self._ranges.end_range(self._range)
        following = self.request.first + len(self.statistics)
        self._range = self._ranges.begin_range(f"step {following}") if following <= self.request.last else None

    @property
    def steps(self) -> Iterator[tuple[int, float, float]]:
        """(number, begin, end) of the steps that have ended, in seconds of `time.perf_counter`."""
        for index, (begin, end) in enumerate(zip(self._ends, self._ends[1:], strict=False)):
            yield self.request.first + index, begin, end

    def synchronize(self) -> None:
        """Wait until the device has passed all markers."""
        for of_step in self.compute.steps:
            for point, _ in of_step:
                point.synchronize()
        for lane in self.lanes.values():
            for wait in lane.stream_waits:
                assert not isinstance(wait.end, float)
                wait.end.synchronize()

    def events(self, clock: Clock) -> Iterator[Event]:
        """Yield the events of every step, lane by lane. Events of one lane do not overlap, except for requests of the
        SSD. All markers have been passed."""
        points, stalls = self._passed(clock)
        for index, (step, begin, end) in enumerate(self.steps):
            for name, lane in (*self.lanes.items(), (REQUESTS, self.requests)):
                for raw in lane.steps[index]:
                    start, stop = clock.of(raw.begin), clock.of(raw.end)
                    if start >= end:  # the event belongs to a step that has not ended
                        continue
                    yield self._event(step, name, _Raw(raw.label, start - begin, stop - begin, raw.nbytes))
            holes = [(start, stop) for start, stop, _ in _within(stalls, begin, end)]
            for at, until, label in self._computed(points, begin, end):
                for start, stop in _without(at, until, holes):
                    yield self._event(step, COMPUTE, _Raw(label, start - begin, stop - begin))

    def waits(self, clock: Clock, host: Waits) -> Iterator[Wait]:
        """Yield the waits of every step and row. Waits of one row do not overlap, except for a wait inside another wait
        of its thread. All markers have been passed. `host`: the waits of threads; it stops recording."""
        threads = host.take()
        keepers = {what: thread.removeprefix(THREAD_PREFIX) for what, thread in host.keepers.items()}
        scripts = {wait.thread for wait in threads if not wait.thread.startswith(THREAD_PREFIX)}
        points, stalls = self._passed(clock)
        for step, begin, end in self.steps:
            of_step = _within(stalls, begin, end)

            def wait(row: str, waiter: str, what: str, span: tuple[float, float], during: str = "") -> Wait:
                kept_by, of_script = keepers.get(what, ""), waiter in scripts
                return Wait(step, row, waiter, what, kept_by, during, of_script, span[0] - begin, span[1] - begin)  # noqa: B023

            for at, until, (during, _) in self._computed(points, begin, end):
                for start, stop, what in of_step:
                    if (span := _shown(start, stop, at, until)) is not None:
                        yield wait(f"{COMPUTE} waits", COMPUTE, what, span, during or BETWEEN)
            for name, lane in self.lanes.items():
                for raw in lane.stream_waits:
                    if (span := _shown(clock.of(raw.begin), clock.of(raw.end), begin, end)) is not None:
                        yield wait(f"{name} waits on its stream", name, raw.label[0], span)
            for of_thread in threads:
                if (span := _shown(of_thread.begin, of_thread.end, begin, end)) is not None:
                    waiter = of_thread.thread.removeprefix(THREAD_PREFIX)
                    yield wait(f"{waiter} waits", waiter, of_thread.what, span)

    def _passed(self, clock: Clock) -> tuple[list[tuple[float, Label]], list[tuple[float, float, str]]]:
        """Return what the compute stream has begun, and its stalls, in seconds of `time.perf_counter`."""
        # All steps are searched: a device that is behind the host does a step's work in the next step.
        points = [(clock.of(point), label) for of_step in self.compute.steps for point, label in of_step]
        stalls = [raw for of_step in self.stall.steps for raw in of_step]
        return points, [(clock.of(raw.begin), clock.of(raw.end), raw.label[0]) for raw in stalls]

    @staticmethod
    def _computed(
        points: Sequence[tuple[float, Label]], begin: float, end: float
    ) -> Iterator[tuple[float, float, Label]]:
        """Yield what the compute stream was in, one after the other, from the begin of a step to its end."""
        first = bisect.bisect_left(points, begin, key=lambda point: point[0])
        at, inside = begin, points[first - 1][1] if first else UNLABELLED
        for moment, label in points[first:]:
            if moment >= end:
                break
            if moment > at:
                yield at, moment, inside
                at = moment
            inside = label
        yield at, end, inside

    def _event(self, step: int, lane: str, raw: _Raw) -> Event:
        """Return the event of `raw`, whose begin and end are seconds from the begin of the step."""
        what, order = raw.label
        unit = self.units[order] if order >= 0 else ""
        assert isinstance(raw.begin, float) and isinstance(raw.end, float)
        return Event(step, lane, what or BETWEEN, unit, raw.begin, raw.end, raw.nbytes)


def _name(label: Label, units: Sequence[str]) -> str:
    what, order = label
    return f"{what} {units[order]}" if order >= 0 else what


def _within(stalls: Iterable[tuple[float, float, str]], begin: float, end: float) -> list[tuple[float, float, str]]:
    return [stall for stall in stalls if stall[0] < end and stall[1] > begin]


def _shown(begin: float, end: float, first: float, last: float) -> tuple[float, float] | None:
    """Return the part of a wait between two moments, if it is worth showing: the two markers around a wait for nothing
    lie 2 us apart on the CPU."""
    begin, end = max(begin, first), min(end, last)
    return (begin, end) if end - begin >= 1e-5 else None


def _without(begin: float, end: float, holes: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the parts of a span outside of the holes."""
    for start, stop in sorted(holes):
        if start >= end:
            break
        if stop <= begin:
            continue
        if start > begin:
            yield begin, start
        begin = stop
    if begin < end:
        yield begin, end
