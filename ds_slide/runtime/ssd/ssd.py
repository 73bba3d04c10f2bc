"""The SSD tier of an engine: the state files, the host buffers in front of them, and the read-ahead.

    store      reads a chunk of optimizer states and the block's weights into pooled host buffers
    update     one step in place, on the update lane
    store      writes both back; h2d copies the new weights from the same buffer

The tier has no thread of its own: every hand-over is a completion of the store, a task of the update lane or a call of
the compute thread, ordered by the two `BufferCache`s. The units lease from them (`ds_slide.store.ssd.unit`).
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
    """The state buffers of units on SSD, by `Unit.order`."""

    weights: dict[int, SsdWeights] = field(default_factory=dict)
    optimizer: dict[int, SsdOptimizerStates] = field(default_factory=dict)
    gradients: dict[int, HeldOnSsd] = field(default_factory=dict)


class SsdStates:
    """The states on SSD. `close` closes `store`. The buffers come last (`provide`): until the units have their states,
    host memory still has the model's own weights."""

    def __init__(
        self,
        store: SsdStore,
        failures: Failures,
        update_order: Iterable[ChunkKey],
        update_meter: LaneMeter,
        units: Sequence[str],
    ) -> None:
        """Begin without buffers. `units`: the names of the units, by `Unit.order`."""
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
        """Set the buffers, before `start`."""
        self.chunks.provide(chunk_buffers)
        self.weights.provide(weight_buffers)
        self.ahead = len(weight_buffers.addresses)

    def start(self) -> None:
        """Begin to read chunks ahead, in the order of the updates, whenever a buffer is free. So the disk does not stop
        between two steps."""
        self.chunks.read_ahead()

    def expect_weights(self, coming: Sequence[Unit], kept: Sequence[Unit]) -> None:
        """Set the blocks whose weights are needed next in host memory, for the GPU or an update, in order. `kept`: the
        blocks among them that must not make room."""
        self.weights.expect(self._on_ssd(coming), self._on_ssd(kept))

    def statistics(self) -> dict[str, Any]:
        """Return statistics of the store since its start."""
        return dict(self.store.statistics())

    def abandon(self) -> None:
        """Give the lanes no more work. Called before the lanes end."""
        self.chunks.abandon()
        self.weights.abandon()

    def close(self) -> None:
        """Close the store, which removes its files. Called after the lanes have ended."""
        self.store.close()
        self.chunks.close()
        self.weights.close()

    def _on_ssd(self, units: Sequence[Unit]) -> list[int]:
        return [unit.order for unit in units if unit.order in self.parts.weights]

    def _load_chunk(self, key: ChunkKey, buffer: torch.Tensor, then: Callable[[], None]) -> None:
        self.parts.optimizer[key[0]].load(key[1], buffer, then)

    def _load_weights(self, order: int, buffer: torch.Tensor, then: Callable[[], None]) -> None:
        self.parts.weights[order].load(buffer, then)
