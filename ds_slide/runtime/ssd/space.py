"""Space of the SSD tier besides the states. It extends their store; where all states are in memory, it opens a store of
its own when the first bytes are needed."""

from __future__ import annotations

import atexit
import functools
import itertools
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from ds_slide.plan.spare import SPARE_SSD_SHARE
from ds_slide.store.ssd.extents import sum_table_bytes
from ds_slide.store.ssd.store import SsdStore

OpenStore = Callable[[str, int, torch.Tensor | None], SsdStore]
"""Opens a store with files of this name and size in bytes, and with this table of checksums."""


class SpaceOnSsd:
    """Space for other data. The compute thread calls it; any thread may read and write the space that it has handed
    out."""

    def __init__(
        self,
        stores: Sequence[SsdStore],
        open_store: OpenStore,
        make_table: Callable[[int], torch.Tensor | None],
        directories: Sequence[Path],
        ranks: int,
    ) -> None:
        """Begin without bytes. `stores`: the engine's stores, one at most; `open_store` adds it. `make_table`: makes a
        table for the checksums of a number of bytes, None without checksums. `ranks`: the number of ranks that share
        the disks."""
        self.nbytes = 0
        """Bytes that have been handed out."""
        self.sum_bytes = 0
        """Bytes of host memory for their checksums."""
        self._stores = stores
        self._open_store = open_store
        self._make_table = make_table
        self._directories = directories
        self._ranks = ranks
        self._numbers = itertools.count(1)
        # Registered here, and not when the store is opened: exit functions run in reverse order, and the lanes of the
        # engine, which may wait for the store, have to end before it. The states' own store is closed with them.
        self._close = functools.partial(_close_all, [] if stores else stores)
        atexit.register(self._close)

    @property
    def store(self) -> SsdStore:
        return self._stores[0]

    def extend(self, nbytes: int) -> int:
        """Add `nbytes`, whole pages, and return the offset of the first. Raises SlideError where the disk has no
        room."""
        name, table = f"inputs-{next(self._numbers)}", self._make_table(nbytes)
        if self._stores:
            offset = self.store.extend(name, nbytes, table)
        else:
            offset = 0
            atexit.unregister(self._open_store(name, nbytes, table).close)
        self.nbytes += nbytes
        self.sum_bytes += 0 if table is None else sum_table_bytes(nbytes)
        return offset

    def room(self) -> int:
        """Return the bytes that may still be taken. Disks are filled evenly, so the fullest of them counts."""
        free: dict[int, list[int]] = {}
        for directory in self._directories:
            there = next(path for path in (directory, *directory.parents) if path.exists())
            free.setdefault(there.stat().st_dev, []).append(shutil.disk_usage(there).free)
        least = min(of_disk[0] // len(of_disk) for of_disk in free.values())
        return int(SPARE_SSD_SHARE * least * len(self._directories)) // self._ranks

    def register(self, address: int, nbytes: int) -> None:
        """Register these pages of a host buffer with the kernel."""
        self.store.register(address, nbytes)

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of a read or write of `nbytes` at the rate so far; 0 where the rate is not known."""
        if not self._stores:
            return 0.0
        totals = self.store.statistics()
        moved = totals["read_bytes"] + totals["written_bytes"]
        return float(nbytes * totals["busy_s"] / moved) if moved else 0.0

    def close(self) -> None:
        """Close a store of its own, after the lanes have ended. Harmless when called twice."""
        atexit.unregister(self._close)
        self._close()


def _close_all(stores: Iterable[SsdStore]) -> None:
    for store in stores:
        store.close()
