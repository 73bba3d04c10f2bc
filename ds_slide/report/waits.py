"""Waits of the host's threads and their causes, while steps are recorded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

THREAD_PREFIX = "ds_slide-"
"""Prefix of the names of the engine's own threads. All other threads are its clients: mainly the thread that
computes."""


class Ranges(Protocol):
    """Names in the record of a profiler (`runtime.device.Device`); NVTX on CUDA, nothing elsewhere."""

    def begin_range(self, name: str) -> Any: ...

    def end_range(self, of: Any) -> None: ...


class NoRanges:
    """Replaces the profiler in a trace without a device."""

    def begin_range(self, name: str) -> None: ...

    def end_range(self, of: None) -> None: ...


class HostWait(NamedTuple):
    """`begin`, `end`: seconds of `time.perf_counter`. `what`: what the thread waited for, as the end of a sentence."""

    thread: str
    what: str
    begin: float
    end: float


class Waits:
    """Collects waits from all threads. A list's append and a dictionary's entry are one operation each, so there is no
    lock."""

    def __init__(self, ranges: Ranges) -> None:
        """Make a collection that records nothing until `is_recording` is set."""
        self.is_recording = False
        self.keepers: dict[str, str] = {}
        """The thread that has brought an awaited thing about, by the thing: a lane that may itself have waited."""
        self.under_way: Callable[[], list[HostWait]] = list
        """Returns the waits that have not ended, as if they ended now."""
        self._ranges = ranges
        self._ended: list[HostWait] = []

    def begin(self, what: str) -> Any:
        """Begin a wait while steps are recorded. Returns the range for `end`."""
        return self._ranges.begin_range(f"waits for {what}")

    def end(self, thread: str, what: str, begin: float, range_: Any) -> None:
        """End a wait. A wait that began before steps were recorded (`range_` None) counts, too. A wait that ends after
        the recording was counted as under way."""
        if self.is_recording:
            self._ended.append(HostWait(thread, what, begin, time.perf_counter()))
        if range_ is not None:
            self._ranges.end_range(range_)

    def completed(self, what: str) -> None:
        """Note that the calling thread has brought `what` about. Called while steps are recorded."""
        self.keepers[what] = threading.current_thread().name

    def take(self) -> list[HostWait]:
        """Return all waits that have ended since the recording began or are under way, and stop recording."""
        self.is_recording = False
        # A wait that is just ending may be in both.
        return list({(wait.thread, wait.begin): wait for wait in [*self.under_way(), *self._ended]}.values())
