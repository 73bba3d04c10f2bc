"""Why the training stood still in a recorded step: each wait is followed to its cause.

The compute stream waits for the weights of a block. The h2d lane, which brings them, waits meanwhile for the block's
update. The update lane is busy, or its states are still on their way from the SSD. The last wait in the chain is the
cause.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ds_slide.report.chrome import RecordedStep
from ds_slide.report.statistics import UPDATE
from ds_slide.report.trace import BETWEEN, COMPUTE, REQUESTS, Event, Wait

_REQUESTS = {
    "states read": "the states of {} from SSD",
    "weights read": "the weights of {} from SSD",
    "states written": "the states of {} on their way to SSD",
    "weights written": "the weights of {} on their way to SSD",
    "input read": "the input of {} from SSD",
    "input written": "the input of {} on its way to SSD",
}
"""The order matters: a buffer that is being written holds up later reads, but not reads that are under way."""
# The part of the text that differs between two waits of one kind, beside the unit.
_NUMBERED = re.compile(r"part \d+ of \d+ of |collective \d+ of rank \d+: ")

Span = tuple[float, float]


@dataclass(frozen=True)
class LaneShare:
    """Seconds of one lane in a step. `waited_s`: waits with a named cause. `idle_s`: the lane had nothing to do."""

    lane: str
    busy_s: float
    waited_s: float
    idle_s: float


@dataclass(frozen=True)
class Cause:
    """A part of a wait of `waiter`, and its cause. `phase`: the end of a sentence."""

    waiter: str
    what: str
    phase: str
    begin: float
    end: float


@dataclass(frozen=True)
class LargestWait:
    """All waits of one kind in one phase. `units`: seconds by unit, the longest first; empty for waits of no unit."""

    waiter: str
    what: str
    phase: str
    seconds: float
    units: dict[str, float]

    @property
    def sentence(self) -> str:
        what = self.what
        if self.units:
            longest = next(iter(self.units))
            what = what.replace(UNIT, longest if len(self.units) == 1 else f"{len(self.units)} units")
            if len(self.units) > 1:
                what += f" (longest: {longest}, {duration(self.units[longest])})"
        return f"{self.waiter} waited {duration(self.seconds)} for {what} {self.phase}"


UNIT = "{unit}"
"""Placeholder for the unit's name in `LargestWait.what`."""


def duration(seconds: float) -> str:
    """Return the text of a duration: "0.31 s", "4.7 ms"."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def lane_shares(step: RecordedStep) -> list[LaneShare]:
    """Return the shares from the rows of the record. The disk's requests overlap, so its busy time comes from the
    statistics."""
    shares = []
    for lane in step.lanes:
        busy = united((work.begin, work.end) for work in step.work if work.lane == lane)
        waited = united((wait.begin, wait.end) for wait in step.waits if wait.waiter == lane)
        busy_s = _length(clipped(busy, 0.0, step.seconds))
        waited_s = _length(_minus(waited, busy))
        if lane == REQUESTS:
            busy_s = min(step.seconds, step.ssd_busy_s)
        shares.append(LaneShare(lane, busy_s, waited_s, max(0.0, step.seconds - busy_s - waited_s)))
    return shares


def largest_waits(step: RecordedStep, count: int = 3) -> list[LargestWait]:
    """Return the longest waits of the compute stream and of the script's threads, grouped by cause."""
    names = re.compile(
        r"(?<![\w.])(" + "|".join(map(re.escape, sorted(step.units, key=len, reverse=True))) + r")(?!\w)"
    )
    groups: dict[tuple[str, str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for cause in causes(step):
        what = _NUMBERED.sub("", cause.what)
        found = names.search(what) if step.units else None
        unit = "" if found is None else found[1]
        kind = what if found is None else what[: found.start()] + UNIT + what[found.end() :]
        groups[cause.waiter, kind, cause.phase][unit] += cause.end - cause.begin
    waits = []
    for (waiter, what, phase), by_unit in groups.items():
        units = dict(sorted(by_unit.items(), key=lambda item: -item[1]))
        seconds = sum(units.values())
        waits.append(LargestWait(waiter, what, phase, seconds, {} if "" in units else units))
    worth_saying = [wait for wait in waits if wait.seconds >= 0.001 * step.seconds]
    return sorted(worth_saying, key=lambda wait: -wait.seconds)[:count]


def causes(step: RecordedStep) -> Iterator[Cause]:
    """Yield the causes of all waits of the compute stream, and of the script's threads while the stream computed."""
    stalls = [wait for wait in step.waits if wait.waiter == COMPUTE]
    of_script = [wait for wait in step.waits if wait.of_script]
    search = _Search(step)
    for stall in stalls:
        phase = _phase(step, stall)
        # Where a thread of the script waits inside the stall, its wait names the cause better.
        for begin, end, wait in _refined(stall, of_script):
            for start, stop, what in search.behind(begin, end, wait.what, wait.kept_by):
                yield Cause(COMPUTE, what, phase, start, stop)
    stood = united((stall.begin, stall.end) for stall in stalls)
    for wait in of_script:
        for begin, end in _minus([(wait.begin, wait.end)], stood):
            for start, stop, what in search.behind(begin, end, wait.what, wait.kept_by):
                yield Cause(wait.waiter, what, _phase(step, wait), start, stop)


class _Search:
    """Follows waits from lane to lane."""

    def __init__(self, step: RecordedStep) -> None:
        self._waits: dict[str, list[Wait]] = defaultdict(list)
        for wait in step.waits:
            self._waits[wait.waiter].append(wait)
        self._busy = united((work.begin, work.end) for work in step.work if work.lane == UPDATE)
        requests = [work for work in step.work if work.lane == REQUESTS and work.what in _REQUESTS]
        self._requests = sorted(requests, key=lambda work: list(_REQUESTS).index(work.what))

    def behind(
        self, begin: float, end: float, what: str, lane: str, seen: frozenset[str] = frozenset()
    ) -> Iterator[tuple[float, float, str]]:
        """Yield (begin, end, cause) for each part of a wait for `what`, which `lane` brings about."""
        left = [(begin, end)]
        for wait in self._waits[lane] if lane not in seen else ():
            for start, stop in clipped(left, wait.begin, wait.end):
                yield from self.behind(start, stop, wait.what, wait.kept_by, seen | {lane})
            left = _minus(left, [(wait.begin, wait.end)])
        if lane == UPDATE and self._requests:
            # The lane gets an update when its states have arrived: until then it has nothing to do.
            idle = _minus(left, self._busy)
            for part in idle:
                yield from self._disk(part, what)
            left = _minus(left, idle)
        yield from ((start, stop, what) for start, stop in left)

    def _disk(self, part: Span, what: str) -> Iterator[tuple[float, float, str]]:
        under_way = [request for request in self._requests if clipped([part], request.begin, request.end)]
        # Requests of the awaited unit come first.
        own = [each for each in under_way if each.unit and re.search(rf"{re.escape(each.unit)}(?!\w)", what)]
        left = [part]
        for request in [*own, *under_way]:
            for start, stop in clipped(left, request.begin, request.end):
                yield start, stop, _REQUESTS[request.what].format(request.unit)
            left = _minus(left, [(request.begin, request.end)])
        yield from ((start, stop, what) for start, stop in left)


def _refined(stall: Wait, of_script: Sequence[Wait]) -> Iterator[tuple[float, float, Wait]]:
    left = [(stall.begin, stall.end)]
    for wait in of_script:
        for begin, end in clipped(left, wait.begin, wait.end):
            yield begin, end, wait
        left = _minus(left, [(wait.begin, wait.end)])
    yield from ((begin, end, stall) for begin, end in left)


def _phase(step: RecordedStep, wait: Wait) -> str:
    """Return the phase of a wait: what the compute stream was in, or what it came from and went to."""
    if wait.during not in ("", BETWEEN):
        return f"in {wait.during}"
    blocks = sorted((w for w in step.work if w.lane == COMPUTE and w.what != BETWEEN), key=lambda work: work.begin)
    before: Event | None = None
    for block in blocks:
        if block.begin > wait.begin:
            break
        before = block
    after = next((block for block in blocks if block.begin > wait.begin), None)
    if before is None:
        return "before the first block" if after is not None else "outside of the blocks"
    if wait.begin < before.end or (after is not None and before.what == after.what):
        return f"in {before.what}"
    return f"after the last block's {before.what}"


def united(spans: Iterable[Span]) -> list[Span]:
    """Return the union of the spans, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def clipped(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """Return the parts of the spans between two moments."""
    return [(max(b, begin), min(e, end)) for b, e in spans if b < end and e > begin]


def _minus(spans: Iterable[Span], holes: Sequence[Span]) -> list[Span]:
    left = list(spans)
    for begin, end in holes:
        parts = [((b, min(e, begin)), (max(b, end), e)) for b, e in left]
        left = [part for pair in parts for part in pair if part[1] > part[0]]
    return left


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
