"""Pools of host buffers: for chunks and weights between SSD and update, and for gradients on their way from the GPU.

A buffer has one owner at a time: the thread with the lease, which may hand it to another thread along with its work.
The last owner releases it. Plan and budget include all buffers of a pool, and all memory is allocated at the start.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import torch

from ds_slide.runtime.core.futures import Failures


class BufferLease:
    """The right to one buffer of a pool. The buffer of a dropped lease goes back with the last tensor that views it,
    and no thread is woken. Only a failed lane drops leases, and its failure wakes all threads."""

    __slots__ = ("_native", "buffer", "pool")

    def __init__(self, pool: BufferPool, native: Any) -> None:
        self.pool = pool
        self._native = native
        self.buffer = torch.frombuffer(native.memory, dtype=torch.uint8)
        """A flat tensor of bytes; the content is left over from its last user."""

    def release(self) -> None:
        """Give the buffer back, once, from any thread. Another owner may write to the tensors that view it from now
        on."""
        native, self._native = self._native, None
        self.pool._take_back(native)


class BufferPool:
    """The leases of a `_native.Pool`. All methods may be called from any thread.

    The wait is here and not in C++, so that a failure ends it, the watchdog sees it, and `tests/liveness` explores it.
    """

    def __init__(self, native: Any, failures: Failures, what: str) -> None:
        """Serve the buffers of `native`. `what`: the name of the pool in the plan, a plural."""
        self._native = native
        self._failures = failures
        self._what = what
        self.buffer_bytes: int = native.buffer_bytes
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        """One entry for each waiting thread, in the order of service."""
        self.waits = 0
        self.waited_s = 0.0

    @property
    def addresses(self) -> list[int]:
        """The addresses of all buffers, lent or not."""
        addresses: list[int] = self._native.addresses
        return addresses

    def try_lease(self) -> BufferLease | None:
        """Return a lease if a buffer is free and no thread waits for one."""
        native = None if self._queue else self._native.try_lease()
        return None if native is None else BufferLease(self, native)

    def lease(self) -> BufferLease:
        """Return a lease; threads are served first come, first served. Raises when a lane has failed."""
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
            return BufferLease(self, native)

    def count_wait(self, began: float) -> None:
        """Count a wait for a buffer since `began`, in seconds of `time.perf_counter`, whether here or in the caller."""
        self.waits += 1
        self.waited_s += time.perf_counter() - began

    def _take_back(self, native: Any) -> None:
        with self._changed:
            native.release()
            if self._queue:
                self._changed.notify_all()

    def statistics(self) -> dict[str, int | float | bool]:
        """Return statistics since the start: buffers, free ones, the most leased at once, bytes, whether they are
        page-locked ("pinned"), the number of waits, and the seconds of all waits together."""
        return {**self._native.stats(), "waits": self.waits, "waited_s": self.waited_s}

    def close(self) -> None:
        """Free the memory. The buffer of an open lease is freed when it comes back."""
        self._native.close()
