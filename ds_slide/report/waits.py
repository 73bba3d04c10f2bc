"""Which thread of the host stood still and what for, while steps are recorded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

THREAD_PREFIX = "ds_slide-"
"""Of the names of the engine's own threads. All others are its clients: the thread that computes, above all."""


class Ranges(Protocol):
    """Names in the record of a profiler (`runtime.device.Device`); NVTX on CUDA, nothing elsewhere."""

    def begin_range(self, name: str) -> Any: ...

    def end_range(self, of: Any) -> None: ...


class NoRanges:
    """Of a trace without a device."""

    def begin_range(self, name: str) -> None: ...

    def end_range(self, of: None) -> None: ...


class HostWait(NamedTuple):
    """`begin` and `end` in seconds of `time.perf_counter`; `what`: it waited for, as the end of a sentence."""

    thread: str
    what: str
    begin: float
    end: float


class Waits:
    """Called by all threads. A list's append and a dictionary's entry are one operation each, so nothing is locked."""

    def __init__(self, ranges: Ranges) -> None:
        """Records nothing until `is_recording` is set."""
        self.is_recording = False
        self.keepers: dict[str, str] = {}
        """The thread that has brought about what is waited for, by its name: a lane that may itself have waited."""
        self.under_way: Callable[[], list[HostWait]] = list
        """Waits that have not ended, as if they ended now."""
        self._ranges = ranges
        self._ended: list[HostWait] = []

    def begin(self, what: str) -> Any:
        """A wait begins while steps are recorded. -> for `end`."""
        return self._ranges.begin_range(f"waits for {what}")

    def end(self, thread: str, what: str, begin: float, range_: Any) -> None:
        """It ends. One that began before steps were recorded (`range_` None) counts, too, and one that ends after has
        been seen as under way."""
        if self.is_recording:
            self._ended.append(HostWait(thread, what, begin, time.perf_counter()))
        if range_ is not None:
            self._ranges.end_range(range_)

    def kept(self, what: str) -> None:
        """The calling thread has brought `what` about. Called while steps are recorded."""
        self.keepers[what] = threading.current_thread().name

    def take(self) -> list[HostWait]:
        """All that have ended since the recording began, and those under way; records no more."""
        self.is_recording = False
        # One that is just ending may be in both.
        return list({(wait.thread, wait.begin): wait for wait in [*self.under_way(), *self._ended]}.values())
