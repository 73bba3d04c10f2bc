"""Hands buffers from thread to thread: futures, failures that end every wait, and a record of each wait.

No wait of the engine has a time-out. It ends when its condition holds, or at the first failure of any lane, which wakes
every waiting thread. Each wait is recorded with a description while it lasts. So the watchdog
(`ds_slide.runtime.core.ranks.watchdog`) can tell a hang from slow work, and name it.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ds_slide.errors import SlideError
from ds_slide.report.statistics import StepRecorder
from ds_slide.report.waits import THREAD_PREFIX, HostWait, NoRanges, Waits
from ds_slide.runtime.core.device import PASSED, Device, Marker

Wake = Callable[[], None]


class Ends(Protocol):
    """A lane (`ds_slide.runtime.core.lanes`)."""

    def end(self) -> None:
        """Let the thread end after the work submitted so far."""


class Presses(Protocol):
    """The work of a future (`ds_slide.runtime.core.update.Update`)."""

    def press(self) -> None:
        """Make the work urgent. Called before a wait begins."""


@dataclass(frozen=True)
class Wait:
    """A wait of one thread. `number` distinguishes the waits of one thread."""

    number: int
    thread: str
    what: str
    begin: float
    """The begin, in seconds of `time.perf_counter`."""
    for_ranks: bool = False
    """Whether the thread waits for other ranks."""

    @property
    def of_client(self) -> bool:
        """Whether the training itself waits, and not just an idle lane."""
        return not self.thread.startswith(THREAD_PREFIX)


@dataclass(frozen=True)
class _Outstanding:
    """A collective submitted to the GPU."""

    what: str
    end: Marker


class Failures:
    """The first exception of any lane, and the waits that it ends. A failed lane cannot keep its open futures, so every
    wait ends with its exception."""

    def __init__(self, waits: Waits | None = None) -> None:
        """Begin without a failure. `waits`: the record for the waits of recorded steps."""
        self.traced = waits or Waits(NoRanges())
        self.traced.under_way = self._under_way
        self._lock = threading.Lock()  # guards what follows, and is held while nothing else is taken
        self._first: SlideError | None = None
        self._cause: BaseException | None = None
        self._waits: dict[int, tuple[Wait, Wake | None]] = {}
        self._idle: list[Ends] = []
        self._numbers = itertools.count()
        self._outstanding: deque[_Outstanding] = deque()
        self.who_has_ended: Callable[[], str] = str
        """Names the other ranks that have ended; empty where that is not known."""
        self.progress = 0
        """Counts hand-overs: futures, transfers and tasks completed. Two threads may count one together: it only
        has to change."""

    # ---- failing -----------------------------------------------------------------------------------------------------

    def record(self, lane: str, error: BaseException) -> None:
        """Record the first failure: it wakes every waiting thread, and every later wait raises."""
        self._fail(
            SlideError(
                f"the {lane} lane stopped with {type(error).__name__}: {error}; the weights in memory are no longer "
                "consistent: end this run and resume from the last checkpoint"
            ),
            error,
        )

    def end(self, message: str) -> None:
        """Record a failure with this message."""
        self._fail(SlideError(message), None)

    def _fail(self, error: SlideError, cause: BaseException | None) -> None:
        with self._lock:
            if self._first is None:
                self._first, self._cause = error, cause
            wakes = [wake for _, wake in self._waits.values() if wake is not None]
            lanes, self._idle = self._idle, []
        for wake in wakes:
            wake()
        for lane in lanes:
            lane.end()

    def end_idle(self, lane: Ends) -> None:
        """Register a lane, whose thread may wait only for work. It is ended once, at the first failure, or at once
        after a failure: no thread would use later work."""
        with self._lock:
            if self._first is None:
                self._idle.append(lane)
                return
        lane.end()

    def raise_first(self) -> None:
        """Raise the first failure, if there is one."""
        if self._first is not None:
            raise SlideError(str(self._first)) from self._cause

    @property
    def message(self) -> str:
        """The message of the first failure; empty when there is none."""
        return "" if self._first is None else str(self._first)

    # ---- waiting -----------------------------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, what: str, wake: Wake | None = None, *, for_ranks: bool = False) -> Iterator[None]:
        """Record a wait of the calling thread. `what`: what it waits for, as the end of a sentence. `wake`: ends the
        wait when a lane fails, at once if a lane has failed already; None for a wait that cannot be ended from outside.
        The caller calls `raise_first` when it was woken for no other reason. `for_ranks`: it waits for other ranks, and
        never ends if one of them has ended."""
        thread, begin, waits = threading.current_thread().name, time.perf_counter(), self.traced
        with self._lock:
            number = next(self._numbers)
            self._waits[number] = (Wait(number, thread, what, begin, for_ranks), wake)
            failed = self._first is not None
        range_ = waits.begin(what) if waits.is_recording else None
        try:
            if failed and wake is not None:
                wake()
            yield
        finally:
            waits.end(thread, what, begin, range_)  # first recorded, then removed: it is always in one of the two
            with self._lock:
                del self._waits[number]

    def wait_for(self, changed: threading.Condition, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready()`, with `changed` held. Raises when a lane has failed."""
        if ready():
            return
        with self.waiting(what, functools.partial(_notify, changed)):
            while not ready():
                self.raise_first()
                changed.wait()

    def waits(self) -> list[Wait]:
        """Return the present waits, the oldest first."""
        with self._lock:
            return [wait for wait, _ in self._waits.values()]

    def _under_way(self) -> list[HostWait]:
        now = time.perf_counter()
        return [HostWait(wait.thread, wait.what, wait.begin, now) for wait in self.waits()]

    def progressed(self) -> None:
        """Count a hand-over, as a sign of progress for the watchdog."""
        self.progress += 1

    # ---- collectives -------------------------------------------------------------------------------------------------

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Record a call of torch.distributed, during which the host may wait for the other ranks."""
        try:
            with self.waiting(f"the other ranks in {what}", for_ranks=True):
                yield
        except RuntimeError as error:
            if isinstance(error, SlideError):
                raise
            ended = self.who_has_ended() or "mostly because another rank has ended"
            raise SlideError(f"{what} failed: {ended}: {' '.join(str(error).split())}") from error
        self.progressed()

    def outstanding(self, what: str, end: Marker) -> None:
        """Record that the collective `what` has been submitted to the GPU, and ends at `end`."""
        with self._lock:
            self._drop_passed()
            if self._outstanding or not end.done():
                self._outstanding.append(_Outstanding(what, end))

    def oldest_outstanding(self) -> str | None:
        """Return the running collective of the GPU, or the next one. Asks the GPU, without waiting for it."""
        with self._lock:
            self._drop_passed()
            return self._outstanding[0].what if self._outstanding else None

    def _drop_passed(self) -> None:
        # Collectives run in the order of their submission, on one stream: the first marker that has not passed ends the
        # search.
        while self._outstanding and self._outstanding[0].end.done():
            self._outstanding.popleft()
            self.progress += 1


def _notify(changed: threading.Condition) -> None:
    with changed:
        changed.notify_all()


_making_events = threading.Lock()  # so that all threads that wait for one future share its event


class Future:
    """The result of a hand-over, which is completed once: the worker calls `complete(marker)` when the work has been
    *issued*. The caller of `wait()` gets the marker, and owns the buffer after the marker has passed."""

    __slots__ = ("_ended", "_failures", "_is_complete", "_marker", "_work", "what")

    def __init__(self, failures: Failures, what: str = "a hand-over", work: Presses | None = None) -> None:
        """Make an open future. `what`: what it stands for. `work`: is pressed before a wait begins."""
        self._ended: threading.Event | None = None  # made by the first thread that waits; mostly there is none
        self._is_complete = False
        self._marker = PASSED
        self._failures = failures
        self._work = work
        self.what = what

    @classmethod
    def completed(cls, failures: Failures, marker: Marker = PASSED, what: str = "a hand-over") -> Future:
        """Return a future for work that has been issued already, and ends at `marker`."""
        future = cls(failures, what)
        future._is_complete, future._marker = True, marker
        return future

    def complete(self, marker: Marker = PASSED) -> None:
        self._marker = marker
        if self._failures.traced.is_recording:
            self._failures.traced.completed(self.what)
        self._is_complete = True
        # Read the event after `_is_complete` is set. A waiting thread makes the event and then reads the flag: one of
        # the two sees the other.
        if self._ended is not None:
            self._ended.set()
        self._failures.progressed()

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    @property
    def has_ended(self) -> bool:
        """Whether the work has run, so that no stream has to wait for it."""
        return self._is_complete and self._marker.done()

    def wait(self) -> Marker:
        """Block this host thread until the work has been issued; raises when a lane has failed."""
        if not self._is_complete:
            if self._work is not None:
                self._work.press()
            with _making_events:
                ended = self._ended = self._ended or threading.Event()
            with self._failures.waiting(self.what, ended.set):
                if not self._is_complete:
                    ended.wait()
            if not self._is_complete:
                self._failures.raise_first()
        return self._marker

    def synchronize(self) -> None:
        """Block until the work has been issued and has run."""
        synchronize(self._failures, self.wait(), self.what)


def wait_on_stream(future: Future, device: Device, recorder: StepRecorder) -> None:
    """Make the calling thread's stream wait for the work of `future`, and record the time of the wait."""
    if not future.has_ended:
        with recorder.stalled(future.what):
            device.wait(future.wait())


def synchronize(failures: Failures, marker: Marker, what: str) -> None:
    """Block this host thread until the GPU has passed `marker`."""
    if not marker.done():
        with failures.waiting(f"the GPU, for {what}"):
            marker.synchronize()
        failures.progressed()
