"""Host buffers that come and go: chunks and weights between SSD and update, gradients on their way down.

One owner at a time: whoever has a lease, which may be handed on to another thread with the work that is done in the
buffer, until that releases it. Plan and budget have all buffers of a pool, and all memory is there from the start.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import torch

from ds_slide.runtime.core.futures import Failures


class Lease:
    """The right to one buffer of a pool. One that is dropped goes back with the last tensor that views it, but that
    wakes nobody: it is for the lane that has failed, which wakes everybody."""

    __slots__ = ("_native", "buffer", "pool")

    def __init__(self, pool: BufferPool, native: Any) -> None:
        self.pool = pool
        self._native = native
        self.buffer = torch.frombuffer(native, dtype=torch.uint8)
        """Flat, of bytes; what its last user has left in it."""

    def release(self) -> None:
        """Give the buffer back, from any thread: tensors that view it are another's from now on. Once."""
        native, self._native = self._native, None
        self.pool._take_back(native)


class BufferPool:
    """The leases of a `_native.Pool`. All methods may be called from any thread.

    The wait is here and not in C++, so that a failure ends it, the watchdog knows of it, and `tests/liveness` explores
    it.
    """

    def __init__(self, native: Any, failures: Failures, what: str) -> None:
        """`what`: its name in the plan, a plural."""
        self._native = native
        self._failures = failures
        self._what = what
        self.buffer_bytes: int = native.buffer_bytes
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        """One entry for each thread that waits; the first of them is served first."""
        self.waits = 0
        self.waited_s = 0.0

    @property
    def addresses(self) -> list[int]:
        """The addresses of all buffers, lent or not."""
        addresses: list[int] = self._native.addresses
        return addresses

    def try_lease(self) -> Lease | None:
        """A buffer if one is free and nobody waits for it."""
        native = None if self._queue else self._native.try_lease()
        return None if native is None else Lease(self, native)

    def lease(self) -> Lease:
        """A buffer, for which threads wait in the order in which they came. Raises when a lane has failed."""
        with self._changed:
            if (lease := self.try_lease()) is not None:
                return lease
            place, began, native = object(), time.perf_counter(), None
            self._queue.append(place)

            def served() -> bool:
                nonlocal native
                if native is None and self._queue[0] is place:
                    native = self._native.try_lease()
                return native is not None

            try:
                self._failures.wait_for(self._changed, served, f"one of the {self._what}")
            finally:
                self._queue.remove(place)
                self._changed.notify_all()  # another is the first now
                self.count_wait(began)
            return Lease(self, native)

    def count_wait(self, began: float) -> None:
        """Somebody has waited for a buffer since `began`, in seconds of `time.perf_counter`, here or by himself."""
        self.waits += 1
        self.waited_s += time.perf_counter() - began

    def _take_back(self, native: Any) -> None:
        with self._changed:
            native.release()
            if self._queue:
                self._changed.notify_all()

    def statistics(self) -> dict[str, int | float | bool]:
        """Since the start: buffers, free ones, the most that were leased at once, bytes, whether they are page-locked
        ("pinned"), how often somebody waited for one, and the seconds of all waits together."""
        return {**self._native.stats(), "waits": self.waits, "waited_s": self.waited_s}

    def close(self) -> None:
        """Free the memory: of leases that are still out, when they come back."""
        self._native.close()
