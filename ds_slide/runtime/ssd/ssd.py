"""The SSD tier of an engine: the state files, the host buffers in front of them, and what is read ahead.

    store      reads a chunk of optimizer states and the block's weights into pooled host buffers
    update     one step in place, on the update lane
    store      writes both back; h2d copies the new weights from the same buffer

No thread of its own: every hand-over is a completion of the store, a task of the update lane or a call of the compute
thread, ordered by the two `BufferCache`s. The units lease from them (`ds_slide.store.ssd.unit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_slide.report.statistics import LaneMeter
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.pool import BufferPool
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.ssd.buffers import BufferCache
from ds_slide.store.ssd.store import SsdStore
from ds_slide.store.ssd.unit import ChunkKey, GradientBuffer, HeldOnSsd, SsdOptimizerStates, SsdWeights


@dataclass(frozen=True)
class SsdParts:
    """What units have on SSD, by their order."""

    weights: dict[int, SsdWeights] = field(default_factory=dict)
    optimizer: dict[int, SsdOptimizerStates] = field(default_factory=dict)
    gradients: dict[int, HeldOnSsd] = field(default_factory=dict)


class SsdStates:
    """`store` is closed by `close`. The buffers come last (`provide`): until the units have their states, host memory
    still has what the model came with."""

    def __init__(
        self,
        store: SsdStore,
        failures: Failures,
        update_order: Iterable[ChunkKey],
        update_meter: LaneMeter,
        units: Sequence[str],
    ) -> None:
        """`units`: their names, by their order."""
        self.store = store
        self.parts = SsdParts()
        self.chunks: BufferCache[ChunkKey] = BufferCache(
            None,
            self._load_chunk,
            failures,
            update_order,
            "optimizer states",
            lambda key: f"{units[key[0]]}, chunk {key[1]}",
        )
        self.weights: BufferCache[int] = BufferCache(
            None, self._load_weights, failures, what="weights", named=units.__getitem__
        )
        self.gradient = GradientBuffer(update_meter)
        self.ahead = 0
        """Blocks whose weights may be read ahead."""

    def provide(self, chunk_buffers: BufferPool, weight_buffers: BufferPool) -> None:
        """Before `start`."""
        self.chunks.provide(chunk_buffers)
        self.weights.provide(weight_buffers)
        self.ahead = len(weight_buffers.addresses)

    def start(self) -> None:
        """Begin to read chunks ahead, in the order of the updates, whenever a buffer is free: the disk does not stop
        between two steps."""
        self.chunks.read_ahead()

    def expect_weights(self, coming: Sequence[Unit], kept: Sequence[Unit]) -> None:
        """Blocks whose weights are needed next in host memory, for the GPU or an update, in order; and those of them
        that must not make room."""
        self.weights.expect(self._on_ssd(coming), self._on_ssd(kept))

    def statistics(self) -> dict[str, Any]:
        """Statistics of the store since its start."""
        return dict(self.store.statistics())

    def abandon(self) -> None:
        """Before the lanes end: nothing more is brought to them."""
        self.chunks.abandon()
        self.weights.abandon()

    def close(self) -> None:
        """After the lanes have ended. The files are removed."""
        self.store.close()
        self.chunks.close()
        self.weights.close()

    def _on_ssd(self, units: Sequence[Unit]) -> list[int]:
        return [unit.order for unit in units if unit.order in self.parts.weights]

    def _load_chunk(self, key: ChunkKey, buffer: torch.Tensor, then: Callable[[], None]) -> None:
        self.parts.optimizer[key[0]].load(key[1], buffer, then)

    def _load_weights(self, order: int, buffer: torch.Tensor, then: Callable[[], None]) -> None:
        self.parts.weights[order].load(buffer, then)


def moved_bytes(store: SsdStore) -> int:
    """Bytes that the disk has read and written since the start: requests, not whole transfers."""
    statistics = store.statistics()
    return int(statistics["read_bytes"] + statistics["written_bytes"])
