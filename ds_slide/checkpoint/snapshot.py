"""A copy of all states in host memory, from which a checkpoint is written while training goes on.

The state buffers are copied as they are stored (12 bytes a parameter, less with short moments), by several threads:
copying stands still for as long as memory takes, where making the file's fp32 values would take several times that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_slide.checkpoint.one_thread import take_one_thread
from ds_slide.checkpoint.state_buffers import pieces
from ds_slide.plan.placement import USABLE_SHARE
from ds_slide.plan.probe.host_room import HostRoom, host_room
from ds_slide.plan.probe.local_ranks import local_ranks
from ds_slide.runtime.core import running
from ds_slide.runtime.core.unit import Unit
from ds_slide.store.host_memory import HostMemory
from ds_slide.store.in_memory import InMemory, NotHeld, StatesInMemory, WeightsInMemory
from ds_slide.store.state import UnitState

_THREADS = 16
"""The most threads: 8 to 16 cores move as many bytes as the memory of a socket can."""
_PIECE = 1 << 24
"""Items that a thread copies at a time."""


@dataclass(frozen=True)
class _Copy:
    state: UnitState


@dataclass
class Snapshot:
    """Copies of `units`' states from `take` on. `frozen`: those of parameters without optimizer states, too."""

    units: Sequence[Unit]
    frozen: bool
    _copies: dict[int, _Copy] = field(default_factory=dict)

    def of(self, unit: Unit) -> _Copy:
        """The copy of a unit, to be read in its place."""
        return self._copies[unit.order]

    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(items * dtype.itemsize for unit in self.units for _, dtype, items in self._state_buffers(unit))

    def fits(self) -> bool:
        """Whether this rank's share of the memory that is free takes the copy."""
        return self.nbytes() <= self.room().nbytes * USABLE_SHARE

    def room(self) -> HostRoom:
        """This rank's share of the memory that is free, and what says so."""
        return host_room(local_ranks(), running.untouched_host_bytes())

    def take(self) -> None:
        """Copy the units, which have settled and do not change meanwhile. Raises SlideError where memory ends."""
        memory = HostMemory(page_lock=False, huge_pages=True)
        threads = max(1, min(_THREADS, len(os.sched_getaffinity(0)) // local_ranks()))
        with ThreadPoolExecutor(threads, initializer=take_one_thread) as pool:
            pending: list[Future[Any]] = []
            for unit in self.units:
                state_buffers = {}
                for name, dtype, items in self._state_buffers(unit):
                    copy, source = memory.tensor(items, dtype, transfers=False), unit.state.buffers[name]
                    state_buffers[name] = InMemory(copy)
                    for span in pieces(items, _PIECE):
                        if source.tier == "host":
                            pending.append(pool.submit(copy[span].copy_, source.read(span)))
                        else:  # the disk has threads of its own, and a copy from the GPU belongs to this one's stream
                            copy[span].copy_(source.read(span))
                weights = WeightsInMemory(state_buffers.pop("weight"))
                specs = unit.state.specs
                self._copies[unit.order] = _Copy(
                    UnitState(specs, weights, StatesInMemory(specs, state_buffers), NotHeld())
                )
            for future in pending:
                future.result()

    def _state_buffers(self, unit: Unit) -> list[tuple[str, torch.dtype, int]]:
        layout = unit.layout
        numel = layout.local_numel if self.frozen else layout.trainable_numel
        state_buffers = [("weight", unit.state.dtype_of("weight"), numel)]
        return state_buffers + [(spec.name, spec.dtype, spec.items(unit.codec.numel)) for spec in unit.state.specs]
