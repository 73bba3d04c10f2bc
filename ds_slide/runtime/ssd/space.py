"""Space of the SSD tier besides the states. It extends their store; where all states are in memory, it opens a store of
its own when the first bytes are needed."""

from __future__ import annotations

import atexit
import functools
import itertools
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_slide.plan.spare import SPARE_SSD_SHARE
from ds_slide.plan.ssd_settings import SsdSettings
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.lanes import Delay
from ds_slide.store.ssd.extents import PAGE, Contents, sum_table_bytes
from ds_slide.store.ssd.files import IoSettings
from ds_slide.store.ssd.page_sums import PageSums
from ds_slide.store.ssd.store import SsdStore

INPUTS = "the input of a block"


@dataclass(frozen=True)
class StoreMaker:
    """Makes the store of an engine's SSD tier."""

    context: Context
    settings: SsdSettings

    @property
    def stores(self) -> list[SsdStore]:
        """The engine's stores, one at most."""
        return self.context.stores

    @property
    def directories(self) -> Sequence[Path]:
        return [path for _, path in self.settings.parents]

    def open(self, name: str, nbytes: int, table: torch.Tensor | None, contents: Contents) -> SsdStore:
        """Open the store. `name`: the name of its files. `table`: the table of checksums, None without them."""
        context, slide = self.context, self.context.settings.slide
        store = SsdStore(
            self.settings.parents,
            nbytes,
            context.failures,
            name=name,
            io=IoSettings(slide.io_backend, self.settings.queue_depth, self.settings.request_bytes),
            sums=None if table is None else PageSums(table, context.cpu_threads),
            contents=contents,
            delay=Delay(slide.debug.lane_delay_ms, slide.debug.seed + 4),
        )
        self.stores.append(store)
        return store

    def open_for_inputs(self, name: str, nbytes: int, table: torch.Tensor | None) -> SsdStore:
        """Open a store that has no states."""
        store = self.open(name, nbytes, table, Contents(others=INPUTS))
        self.context.recorder.watch_ssd(store)
        return store

    def table(self, nbytes: int) -> torch.Tensor | None:
        """Make a table for the checksums of `nbytes`, None without checksums."""
        if not self.context.settings.slide.checksums:
            return None
        return self.context.memory.tensor(nbytes // PAGE, torch.int32, transfers=False)


class SpaceOnSsd:
    """Space for other data. The compute thread calls it; any thread may read and write the space that it has handed
    out."""

    def __init__(self, maker: StoreMaker, ranks: int) -> None:
        """Begin without bytes. `ranks`: the number of ranks that share the disks."""
        self.nbytes = 0
        """Bytes that have been handed out."""
        self.sum_bytes = 0
        """Bytes of host memory for their checksums."""
        self._maker = maker
        self._ranks = ranks
        self._numbers = itertools.count(1)
        # Registered here, and not when the store is opened: exit functions run in reverse order, and the lanes of the
        # engine, which may wait for the store, have to end before it. The states' own store is closed with them.
        self._close = functools.partial(_close_all, [] if maker.stores else maker.stores)
        atexit.register(self._close)

    @property
    def store(self) -> SsdStore:
        return self._maker.stores[0]

    def extend(self, nbytes: int) -> int:
        """Add `nbytes`, whole pages, and return the offset of the first. Raises SlideError where the disk has no
        room."""
        name, table = f"inputs-{next(self._numbers)}", self._maker.table(nbytes)
        if self._maker.stores:
            offset = self.store.extend(name, nbytes, table)
        else:
            offset = 0
            atexit.unregister(self._maker.open_for_inputs(name, nbytes, table).close)
        self.nbytes += nbytes
        self.sum_bytes += 0 if table is None else sum_table_bytes(nbytes)
        return offset

    def room(self) -> int:
        """Return the bytes that may still be taken. Disks are filled evenly, so the fullest of them counts."""
        free: dict[int, list[int]] = {}
        for directory in self._maker.directories:
            there = next(path for path in (directory, *directory.parents) if path.exists())
            free.setdefault(there.stat().st_dev, []).append(shutil.disk_usage(there).free)
        least = min(of_disk[0] // len(of_disk) for of_disk in free.values())
        return int(SPARE_SSD_SHARE * least * len(self._maker.directories)) // self._ranks

    def register(self, address: int, nbytes: int) -> None:
        """Register these pages of a host buffer with the kernel."""
        self.store.register(address, nbytes)

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of a read or write of `nbytes` at the rate so far; 0 where the rate is not known."""
        if not self._maker.stores:
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
