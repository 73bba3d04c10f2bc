"""Checksums of an SSD store: what is read is what was written last, or the run stops.

One CRC32C for each page of 4 KiB, because that is what every transfer is a multiple of: whatever part of an extent is
read or written, its sums are known, and nothing around it has to be. 4 bytes a page are a thousandth of what is on SSD.
They stay in host memory, as the files do not outlive the run, so that a page that came from another offset or from an
older write is found as well.

Who computes: the thread that hands a write over, before it does; the thread that waits for a read, or for reads that
nobody waits for the one of `CheckThread`; each with the help of `threads` of this object. Never the thread that takes
completions from the disk. An entry of the table belongs to whoever has its page in a transfer: no page is in two
transfers at once unless both read.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable

import torch

from ds_slide import _native
from ds_slide.errors import SlideError
from ds_slide.store.ssd.extents import PAGE

# Of one thread: 23 GB/s from its cache, 8 from memory, measured on a server processor of 2.5 GHz. Four keep up with any
# disks that a machine has, and leave the cores to the update otherwise.
MOST_THREADS = 4

_Then = Callable[[], None]


class PageSums:
    """The checksums of a store. `table`: as in `extend`. `threads`: that may share the work of one call; calls run one
    after the other. SlideError where they cannot be started."""

    def __init__(self, table: torch.Tensor, threads: int) -> None:
        try:
            self._workers = _native.Workers(max(1, min(threads, MOST_THREADS)), [])
        except RuntimeError as error:
            raise SlideError(f"cannot start the threads that compute checksums of states on SSD: {error}") from error
        self._tables: list[tuple[int, torch.Tensor]] = []
        """The tables, each with the number of its first page, in their order."""
        self._pages = 0
        self.extend(table)
        self.is_on = True
        """A benchmark may change it at any time: what is written meanwhile is not known, and passes every check."""
        self._lock = threading.Lock()  # guards what follows
        self._bytes = 0
        self._seconds = 0.0

    def end_threads(self) -> None:
        """End the threads at once, whoever may keep this object. Nothing can be done with it afterwards."""
        del self._workers

    def extend(self, table: torch.Tensor) -> None:
        """The store has got more pages. `table`: int32 [of them], whose content does not matter: they are zeros. Others
        may be using the pages from before meanwhile."""
        zeros = torch.zeros(PAGE, dtype=torch.uint8)
        _native.page_sums(self._workers, zeros.data_ptr(), PAGE, table.data_ptr())
        table[1:].fill_(table[0])
        self._tables.append((self._pages, table))
        self._pages += table.numel()

    def keep(self, offset: int, address: int, nbytes: int) -> None:
        """`nbytes` at `address` are about to be written at byte `offset` of the store."""
        if not self.is_on:
            self._sums_from(offset)[: nbytes // PAGE].zero_()
            return
        started = time.perf_counter()
        _native.page_sums(self._workers, address, nbytes, self._place(offset))
        self._count(nbytes, started)

    def first_wrong(self, offset: int, address: int, nbytes: int) -> int | None:
        """First byte of the first page that is not as it was written; `nbytes` at `address` have been read from byte
        `offset` of the store."""
        if not self.is_on:
            return None
        started = time.perf_counter()
        page = _native.first_wrong_page(self._workers, address, nbytes, self._place(offset))
        self._count(nbytes, started)
        return None if page is None else offset + page * PAGE

    def statistics(self) -> dict[str, int | float]:
        """checked_bytes: written and read so far; checked_s: seconds that callers spent on them, all together."""
        with self._lock:
            return {"checked_bytes": self._bytes, "checked_s": self._seconds}

    def _place(self, offset: int) -> int:
        return self._sums_from(offset).data_ptr()

    def _sums_from(self, offset: int) -> torch.Tensor:
        page = offset // PAGE
        first, table = next(entry for entry in reversed(self._tables) if entry[0] <= page)
        return table[page - first :]

    def _count(self, nbytes: int, started: float) -> None:
        seconds = time.perf_counter() - started
        with self._lock:
            self._bytes += nbytes
            self._seconds += seconds


class CheckThread:
    """Checks what has been read for somebody who does not wait for it, and calls on; what is urgent first.

    Each hand-over has an own `check`, which raises if something is wrong, and an own `then`. `failed`: is given what
    either of them raises. The memory belongs to the transfer until `then`.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._jobs: queue.PriorityQueue[tuple[int, int, _Then, _Then]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, check: Callable[[], None], then: _Then, *, urgent: bool) -> None:
        self._jobs.put((1 if urgent else 2, next(self._numbers), check, then))

    def close(self) -> None:
        """Drop what has not begun and end the thread; called once."""
        self._jobs.put((0, 0, _nothing, _nothing))
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def _run(self) -> None:
        while True:
            priority, _, check, then = self._jobs.get()
            if not priority:
                return
            try:
                check()
                then()
            except BaseException as error:
                self._failed(error)
            check = then = _nothing  # while this waits for the next job, it must not keep alive what the last one knew


def _nothing() -> None:
    """What the job that ends the thread does."""
