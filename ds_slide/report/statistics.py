"""What each lane did in a step, the bound that follows from it, and which lane set it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

LANES = ("compute", "h2d", "d2h", "update")
SSD = "ssd"
"""Of runs with an SSD tier; reads and writes share the disk, so they are one lane."""
SSD_TOTALS = ("read_bytes", "written_bytes", "busy_s", "checked_bytes", "checked_s")
"""Of the store since its start; the last two where it keeps checksums."""
SECONDS_A_DAY = 86_400


class Marker(Protocol):
    """A point in the work of one stream, as `ds_slide.runtime.device` makes them."""

    def done(self) -> bool: ...

    def seconds_until(self, later: Any) -> float:
        """Device seconds between two points that have been passed."""


class LaneMeter:
    """Busy seconds and bytes of one lane. Device intervals are read when they have passed, never waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[tuple[Marker, Marker]] = deque()
        self._seconds = 0.0
        self._bytes = 0

    def add_seconds(self, seconds: float, moved: int = 0) -> None:
        with self._lock:
            self._seconds += seconds
            self._bytes += moved

    def add_interval(self, start: Marker, end: Marker, moved: int = 0) -> None:
        with self._lock:
            self._pending.append((start, end))
            self._bytes += moved
            self._collect()  # here too: inference takes no steps

    def _collect(self) -> None:
        while self._pending and self._pending[0][1].done():
            start, end = self._pending.popleft()
            self._seconds += start.seconds_until(end)

    def take(self) -> tuple[float, int]:
        """Busy seconds and bytes since the last call. An interval still under way counts in the next call."""
        with self._lock:
            self._collect()
            taken = (self._seconds, self._bytes)
            self._seconds, self._bytes = 0.0, 0
            return taken


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
    """Closes the books at every optimizer step.

    The compute lane is busy when it is not waiting for another lane: its time is the step's wall time
    less the measured waits (`stall`). Whatever the host loses between kernels therefore counts as compute.
    """

    def __init__(self) -> None:
        self.meters = {lane: LaneMeter() for lane in LANES[1:]}
        self.stall = LaneMeter()
        self._last_end: float | None = None
        self._ssd: Callable[[], dict[str, Any]] | None = None
        self._ssd_before: dict[str, Any] = {}
        self.latest: StepStatistics | None = None

    def watch_ssd(self, statistics: Callable[[], dict[str, Any]]) -> None:
        """`statistics`: totals of the store since its start (read_bytes, written_bytes, busy_s, and settings)."""
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
        taken = {lane: meter.take() for lane, meter in self.meters.items()}
        stalled, _ = self.stall.take()
        wall = 0.0 if previous is None else now - previous
        ssd = self._ssd_step(wall)
        if previous is None:
            return None
        lanes: dict[str, dict[str, float | int]] = {"compute": {"busy_s": max(0.0, wall - stalled), "bytes": 0}}
        for lane, (seconds, moved) in taken.items():
            lanes[lane] = {"busy_s": seconds, "bytes": moved}
        if ssd:
            lanes[SSD] = {"busy_s": ssd["busy_s"], "bytes": ssd["read_bytes"] + ssd["written_bytes"]}
        bound_lane = max(lanes, key=lambda lane: lanes[lane]["busy_s"])
        bound = min(wall, float(lanes[bound_lane]["busy_s"]))
        self.latest = StepStatistics(step, wall, bound, bound_lane, lanes, ssd)
        return self.latest

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
