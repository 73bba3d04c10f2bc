"""What every lane did and when, of chosen steps, written as a Chrome trace: Perfetto (ui.perfetto.dev) opens it.

Nothing is recorded outside of the chosen steps, and nobody waits for the device inside of them: lanes hand over the
markers that their statistics are read from, and these become seconds when the last step has ended.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ds_slide.report.log import log

Label = tuple[str, int]
"""(what is done, number of the unit in the order of the engine's units)"""
UNLABELLED: Label = ("", -1)
BETWEEN = "outside of the blocks"
"""What the compute lane does that is no forward or backward of a block: the outer modules, the loss, the script."""
COMPUTE, REQUESTS = "compute", "ssd"


class Marker(Protocol):
    """A point in the work of a stream (`runtime.device.Marker`), recorded with a time."""

    def done(self) -> bool: ...

    def synchronize(self) -> None: ...

    def seconds_until(self, later: Any) -> float:
        """Device seconds between two points that have been passed."""


@dataclass(frozen=True)
class TraceRequest:
    """Which steps of an engine are recorded, counted from 1 as in `slide_stats()["step"]`, and the file they go to."""

    path: Path
    first: int
    last: int

    def of_rank(self, rank: int, world_size: int) -> TraceRequest:
        """The same with a file of its own for every rank of several: "step.json" becomes "step.rank1.json"."""
        if world_size == 1:
            return self
        return TraceRequest(self.path.with_suffix(f".rank{rank}{self.path.suffix}"), self.first, self.last)


@dataclass(frozen=True)
class Event:
    """One piece of work of one lane. `begin` and `end` in seconds from the begin of the step that counts it: work that
    was under way then has a negative begin."""

    step: int
    lane: str
    what: str
    unit: str
    begin: float
    end: float
    nbytes: int


@dataclass(frozen=True)
class _Raw:
    """`begin` and `end`: markers, or seconds of `time.perf_counter`."""

    label: Label
    begin: Marker | float
    end: Marker | float
    nbytes: int = 0


class LaneTrace:
    """What one meter has counted, step by step. Called by the meter, which holds its lock."""

    def __init__(self) -> None:
        self._open: list[_Raw] = []
        self._pauses: list[tuple[float, float]] = []
        self.steps: list[list[_Raw]] = []

    def add_interval(self, begin: Marker, end: Marker, nbytes: int, label: Label) -> None:
        self._open.append(_Raw(label, begin, end, nbytes))

    def add_pause(self, begin: float, end: float) -> None:
        """A time inside of the next span that does not count as the lane's own."""
        self._pauses.append((begin, end))

    def add_span(self, begin: float, end: float, nbytes: int, label: Label) -> None:
        pauses, self._pauses = self._pauses, []
        for start, stop in _without(begin, end, pauses):
            self._open.append(_Raw(label, start, stop, nbytes))
            nbytes = 0  # of a span with pauses, its first part has the bytes

    def cut(self) -> None:
        """The step under way ends here."""
        self.steps.append(self._open)
        self._open = []


class ComputeTrace:
    """Where forwards and backwards of blocks begin and end on the compute stream. Called by the thread that computes,
    which is autograd's during a backward: one at a time."""

    def __init__(self) -> None:
        self._inside: list[Label] = []
        self._open: list[tuple[Marker, Label]] = []
        self.steps: list[list[tuple[Marker, Label]]] = []

    def enter(self, label: Label, point: Marker) -> None:
        if label not in self._inside:  # a backward may be announced several times
            self._inside.append(label)
            self._open.append((point, label))

    def leave(self, label: Label, point: Marker) -> None:
        """What was entered before goes on, such as the backward that a recomputed forward is a part of."""
        if label in self._inside:
            self._inside.remove(label)
            self._open.append((point, self._inside[-1] if self._inside else UNLABELLED))

    def cut(self) -> None:
        self.steps.append(self._open)
        self._open, self._inside = [], []  # a forward that an exception has ended is never left


class Requests:
    """Requests of the SSD tier from when they are given to the store until they are complete; several at a time."""

    def __init__(self) -> None:
        self.trace: LaneTrace | None = None
        self._lock = threading.Lock()

    def around(self, what: str, order: int, nbytes: int, then: Callable[[], None]) -> Callable[[], None]:
        """`then`, or, while steps are recorded, a function that records the request and calls `then`."""
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
    """A marker and the host's time of it, by which markers become seconds of `time.perf_counter`.

    The marker is recorded on a stream that has nothing to do, so it is passed within microseconds, unwaited for."""

    marker: Marker
    seconds: float

    def of(self, moment: Marker | float) -> float:
        return moment if isinstance(moment, float) else self.seconds + self.marker.seconds_until(moment)


class Trace:
    """The chosen steps of one engine. `units`: their names, in the engine's order."""

    def __init__(self, request: TraceRequest, units: Sequence[str], lanes: Iterable[str]) -> None:
        self.request = request
        self.units = units
        self.lanes = {lane: LaneTrace() for lane in lanes}
        self.stall = LaneTrace()
        self.compute = ComputeTrace()
        self.requests = LaneTrace()
        self._ends: list[float] = []
        self._statistics: list[dict[str, Any]] = []

    def begin(self, seconds: float) -> None:
        """The first chosen step begins; what the meters counted before it was cut off is not of it."""
        self._ends = [seconds]
        for lane in (*self.lanes.values(), self.stall, self.requests):
            lane.steps.clear()
        self.compute.steps.clear()

    def end_step(self, seconds: float, statistics: dict[str, Any]) -> None:
        """End the step. `statistics`: of the step that ends, as in `slide_stats()`; kept beside the events."""
        self._ends.append(seconds)
        self._statistics.append(statistics)

    def events(self, clock: Clock) -> Iterator[Event]:
        """Lane by lane of every step. Events of one lane do not overlap, but for requests of the SSD. All markers have
        been passed."""
        # Of all steps: a device that is behind the host does what a step has asked for in the next one.
        points = [(clock.of(point), label) for of_step in self.compute.steps for point, label in of_step]
        for index, (begin, end) in enumerate(zip(self._ends, self._ends[1:], strict=False)):
            step = self.request.first + index
            for name, lane in (*self.lanes.items(), (REQUESTS, self.requests)):
                for raw in lane.steps[index]:
                    start, stop = clock.of(raw.begin), clock.of(raw.end)
                    yield self._event(step, name, raw.label, start - begin, stop - begin, raw.nbytes)
            stalls = [(clock.of(raw.begin), clock.of(raw.end)) for raw in self.stall.steps[index]]
            for at, until, label in self._computed(points, begin, end):
                for start, stop in _without(at, until, stalls):
                    yield self._event(step, COMPUTE, label, start - begin, stop - begin, 0)

    @staticmethod
    def _computed(
        points: Sequence[tuple[float, Label]], begin: float, end: float
    ) -> Iterator[tuple[float, float, Label]]:
        """What the compute stream was in, from the begin of a step to its end, one after the other."""
        at, inside = begin, UNLABELLED
        for moment, label in points:
            if moment >= end:
                break
            if moment > at:
                yield at, moment, inside
                at = moment
            inside = label
        yield at, end, inside

    def _event(self, step: int, lane: str, label: Label, begin: float, end: float, nbytes: int) -> Event:
        what, order = label
        unit = self.units[order] if order >= 0 else ""
        return Event(step, lane, what or BETWEEN, unit, begin, end, nbytes)

    def write(self, clock: Clock, *, rank: int) -> None:
        """Write the steps that have ended, and say so; a file that cannot be written does not end a training."""
        path = self.request.path
        if not self._statistics:
            log.warning(
                f"the trace {path} has not been written: the engine has ended before step {self.request.first} had; "
                "name an earlier one in ds_slide.trace.steps"
            )
            return
        # After the last step: its work may still be under way on the device, which the script waits for here.
        for marker in (clock.marker, *(point for of_step in self.compute.steps for point, _ in of_step)):
            marker.synchronize()
        partial = path.with_name(f"{path.name}.partial")
        try:
            with open(partial, "w", encoding="utf-8") as file:
                json.dump(self._document(clock, rank), file)
            os.replace(partial, path)
        except OSError as error:
            log.warning(f"the trace {path} has not been written: {error}; the training is not concerned")
            return
        log.info(f"the trace of {len(self._statistics)} steps is in {path}; ui.perfetto.dev opens it")

    def _document(self, clock: Clock, rank: int) -> dict[str, Any]:
        events = list(self.events(clock))
        begins = dict(enumerate(self._ends, start=self.request.first))
        origin = min([self._ends[0], *(begins[event.step] + event.begin for event in events)])
        lanes = [COMPUTE, *self.lanes, REQUESTS]
        return {
            "displayTimeUnit": "ms",
            "otherData": {"slide_stats": self._statistics},
            "traceEvents": [*_names(lanes, rank), *self._steps(origin, rank)]
            + [
                written
                for number, event in enumerate(events)
                for written in _chrome(event, number, begins[event.step] - origin, rank, lanes.index(event.lane) + 1)
            ],
        }

    def _steps(self, origin: float, rank: int) -> Iterator[dict[str, Any]]:
        for step, (begin, end) in enumerate(zip(self._ends, self._ends[1:], strict=False), start=self.request.first):
            yield {
                "name": f"step {step}",
                "ph": "X",
                "pid": rank,
                "tid": 0,
                "ts": _microseconds(begin - origin),
                "dur": _microseconds(end - begin),
            }


def _without(begin: float, end: float, holes: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """What is left of a span."""
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


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _names(lanes: Sequence[str], rank: int) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"DS-Slide, rank {rank}"}}
    for number, name in enumerate(["step", *lanes]):
        common = {"ph": "M", "pid": rank, "tid": number}
        yield {"name": "thread_name", **common, "args": {"name": name}}
        yield {"name": "thread_sort_index", **common, "args": {"sort_index": number}}


def _chrome(event: Event, number: int, begin: float, rank: int, row: int) -> Iterator[dict[str, Any]]:
    """An event in Chrome's form. `begin`: of the event's step, in seconds from the first moment of the trace."""
    name = f"{event.what} {event.unit}".rstrip()
    details = {
        "step": event.step,
        "lane": event.lane,
        "what": event.what,
        "unit": event.unit,
        "begin_s": event.begin,
        "end_s": event.end,
        "bytes": event.nbytes,
    }
    common = {"name": name, "cat": event.lane, "pid": rank, "tid": row}
    start, end = _microseconds(begin + event.begin), _microseconds(begin + event.end)
    if event.lane != REQUESTS:
        yield {**common, "ph": "X", "ts": start, "dur": end - start, "args": details}
        return
    # Requests overlap, which rows of "X" cannot show.
    yield {**common, "ph": "b", "id": number, "ts": start, "args": details}
    yield {**common, "ph": "e", "id": number, "ts": end}
