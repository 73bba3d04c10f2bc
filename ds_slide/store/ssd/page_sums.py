"""Checksums of an SSD store: a read returns the bytes written last, or the run stops.

Each page of 4 KiB has one CRC32C, because every transfer is a multiple of a page. So any part of an extent can be read
or written without the pages around it. 4 bytes a page are a thousandth of the bytes on SSD. The sums stay in host
memory, because the files do not outlive the run. So a page from another offset or from an older write is found as well.

The thread that submits a write computes its sums first. A read is checked by the thread that waits for it, or else by
the store's check thread. All of them share the `threads` of this object. The thread that takes completions from the
disk never computes. An entry of the table belongs to the transfer of its page: two transfers share a page only if both
read.
"""

from __future__ import annotations

import threading
import time

import torch

from ds_slide import _native
from ds_slide.errors import SlideError
from ds_slide.store.ssd.extents import PAGE


class PageSums:
    """The checksums of a store. `table`: see `extend`. `threads`: the threads that share the work of one call. Calls
    run one after the other. Raises SlideError where the threads cannot be started."""

    def __init__(self, table: torch.Tensor, threads: int) -> None:
        # One thread sums 23 GB/s from its cache and 8 GB/s from memory, measured on a server processor of 2.5 GHz. Four
        # threads keep up with the disks of any machine, and leave the other cores to the update.
        try:
            self._workers = _native.Workers(max(1, min(threads, 4)), [])
        except RuntimeError as error:
            raise SlideError(f"cannot start the threads that compute checksums of states on SSD: {error}") from error
        self._tables: list[tuple[int, torch.Tensor]] = []
        """The tables, each with the number of its first page, in their order."""
        self._pages = 0
        self.extend(table)
        self.is_on = True
        """A benchmark may change this at any time. Pages written while it is False pass every check."""
        self._lock = threading.Lock()  # guards what follows
        self._bytes = 0
        self._seconds = 0.0

    def end_threads(self) -> None:
        """End the threads at once, even while other objects refer to this one, which cannot be used afterwards."""
        del self._workers

    def extend(self, table: torch.Tensor) -> None:
        """Add the sums of new pages, which hold zeros. `table`: int32 [pages] with any content. Other threads may use
        the older pages meanwhile."""
        zeros = torch.zeros(PAGE, dtype=torch.uint8)
        _native.page_sums(self._workers, zeros.data_ptr(), PAGE, table.data_ptr())
        table[1:].fill_(table[0])
        self._tables.append((self._pages, table))
        self._pages += table.numel()

    def keep(self, offset: int, address: int, nbytes: int) -> None:
        """Keep the sums of `nbytes` at `address`, which are about to be written at byte `offset` of the store."""
        if not self.is_on:
            self._sums_from(offset)[: nbytes // PAGE].zero_()
            return
        started = time.perf_counter()
        _native.page_sums(self._workers, address, nbytes, self._place(offset))
        self._count(nbytes, started)

    def first_wrong(self, offset: int, address: int, nbytes: int) -> int | None:
        """Return the first byte of the first page that differs from the last write. `nbytes` at `address` have been
        read from byte `offset` of the store."""
        if not self.is_on:
            return None
        started = time.perf_counter()
        page = _native.first_wrong_page(self._workers, address, nbytes, self._place(offset))
        self._count(nbytes, started)
        return None if page is None else offset + page * PAGE

    def statistics(self) -> dict[str, int | float]:
        """Return checked_bytes (written and read so far) and checked_s (seconds of all callers together)."""
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
