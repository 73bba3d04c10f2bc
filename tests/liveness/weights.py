"""Weights of ranks that read each other's memory: counters that tell what is there, and descriptors without sockets.

The memory files are real, and mapped as between processes. Only the counters, in which a thread sleeps in the kernel,
are replaced by operations of the scheduler, with the results of the binding.
"""

from __future__ import annotations

import os
from typing import Any

from ds_slide import _native
from liveness.scheduler import Operation, active

HAS_SHARED_WEIGHTS = hasattr(_native, "Generations")
"""False on commits whose ranks always gather."""


class _Counters:
    """What is in the memory of one rank."""

    def __init__(self, count: int) -> None:
        self.values = [0] * count
        self.closed = False
        self.changes = 0


class Generations:
    """Instead of `_native.Generations`: one rank's view of the counters of a rank. `file`: which memory file.

    Publishing is a point, as another thread may come before it. Looking at a value is none: who sees an old one waits,
    and that wait ends at once.
    """

    def __init__(self, file: int, count: int) -> None:
        scheduler = active()
        assert scheduler is not None
        tables: dict[int, _Counters] = scheduler.__dict__.setdefault("counters", {})
        self._counters = tables.setdefault(file, _Counters(count))
        self._interrupted = False

    @staticmethod
    def bytes(count: int) -> int:
        return 4 * count

    def describe(self) -> str:
        return f"generations, now {self._counters.values}{', closed' if self._counters.closed else ''}"

    def publish(self, index: int, value: int) -> None:
        self._do("publish")
        self._counters.values[index] = value
        self._counters.changes += 1

    def store(self, index: int, value: int) -> None:
        self._counters.values[index] = value

    def changes(self) -> int:
        return self._counters.changes

    def wait_change(self, seen: int) -> None:
        if self._counters.changes == seen and (scheduler := active()) is not None:
            scheduler.do(Operation("a change of the board", self, lambda: self._counters.changes != seen))

    def poke(self) -> None:
        self._do("poke")
        self._counters.changes += 1

    def close(self) -> None:
        self._do("close")
        self._counters.closed = True
        self._counters.changes += 1

    def interrupt(self) -> None:
        self._do("interrupt")
        self._interrupted = True

    @property
    def closed(self) -> bool:
        return self._counters.closed

    def value(self, index: int) -> int:
        return self._counters.values[index]

    def wait(self, index: int, at_least: int) -> str:
        def ended() -> bool:
            return self._counters.values[index] >= at_least or self._counters.closed or self._interrupted

        if not ended() and (scheduler := active()) is not None:
            scheduler.do(Operation(f"generation {at_least} of unit {index}", self, ended))
        if self._counters.values[index] >= at_least:
            return "reached"
        return "interrupted" if self._interrupted else "closed"

    def _do(self, what: str) -> None:
        if (scheduler := active()) is not None:
            scheduler.do(Operation(what, self))


def file_of(descriptor: int, _part: Any) -> int:
    """Instead of `map_bytes`: which file it is."""
    return os.fstat(descriptor).st_ino


def sharing_of(ranks: Any) -> Any:
    """As `open_sharing`, between ranks of one process."""
    from ds_slide.runtime.core.ranks.sharing import Sharing
    from ds_slide.store.memory_file import MemoryFile

    sharing = Sharing(MemoryFile(), ranks.world_size)
    given = ranks.exchange(sharing.file.descriptor, "the descriptors")
    for rank, descriptor in enumerate(given):
        if rank != ranks.rank:
            sharing.descriptors[rank] = os.dup(descriptor)
    return sharing
