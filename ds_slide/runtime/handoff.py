"""How buffers change owners between threads: tickets, and failures that nobody waits for in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ds_slide.errors import SlideError
from ds_slide.runtime.device import PASSED, Marker

# How soon a waiting thread notices that a lane has failed or the engine has been destroyed.
POLL_S = 0.5


class Failures:
    """The first exception of any lane. A lane that fails can no longer serve the tickets that it
    owes, so every waiting thread looks here while it waits, and raises in its place."""

    def __init__(self) -> None:
        self._first: tuple[str, BaseException] | None = None
        self._lock = threading.Lock()
        self._wakes: list[Callable[[], None]] = []

    def record(self, lane: str, error: BaseException) -> None:
        with self._lock:
            self._first = self._first or (lane, error)
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

    # STAND-INS until the watchdog is merged: the same names, and of what they will do only the waking.

    @contextmanager
    def waiting(self, what: str, wake: Callable[[], None] | None = None) -> Iterator[None]:  # noqa: ARG002
        """Around a wait of the calling thread. `wake` is called, from any thread, when a lane fails."""
        with self._lock:
            if wake is not None:
                self._wakes.append(wake)
            failed = self._first is not None
        if failed and wake is not None:
            wake()
        try:
            yield
        finally:
            with self._lock:
                if wake is not None:
                    self._wakes.remove(wake)

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:  # noqa: ARG002
        """Around the call of a collective."""
        yield

    # End of the stand-ins.

    def raise_first(self) -> None:
        if self._first is not None:
            lane, error = self._first
            raise SlideError(
                f"the {lane} lane stopped with {type(error).__name__}: {error}; the weights in memory are no longer "
                "consistent: end this run and resume from the last checkpoint"
            ) from error


class Ticket:
    """A promise that is kept once. The keeper calls `keep(marker)` when the work has been *issued*;
    whoever calls `wait()` gets the marker, and owns the buffer from there, after the marker."""

    __slots__ = ("_failures", "_kept", "_marker")

    def __init__(self, failures: Failures) -> None:
        self._kept = threading.Event()
        self._marker = PASSED
        self._failures = failures

    @classmethod
    def kept(cls, failures: Failures) -> Ticket:
        ticket = cls(failures)
        ticket._kept.set()
        return ticket

    def keep(self, marker: Marker = PASSED) -> None:
        self._marker = marker
        self._kept.set()

    @property
    def is_kept(self) -> bool:
        return self._kept.is_set()

    def wait(self) -> Marker:
        """Block this host thread until the work has been issued; raises when a lane has failed."""
        while not self._kept.wait(timeout=POLL_S):
            self._failures.raise_first()
        return self._marker

    def synchronize(self) -> None:
        """Block until the work has been issued and has run."""
        self.wait().synchronize()
