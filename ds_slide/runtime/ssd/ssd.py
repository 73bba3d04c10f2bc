"""The SSD tier of an engine: the state files, the host buffers in front of them, and the read-ahead.

    store      reads a chunk of optimizer states and the block's weights into pooled host buffers
    update     one step in place, on the update lane
    store      writes both back; h2d copies the new weights from the same buffer

The tier has no thread of its own: every hand-over is a completion of the store, a task of the update lane or a call of
the compute thread, ordered by the two `BufferCache`s. The units lease from them (`ds_slide.store.ssd.unit`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

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


@dataclass(frozen=True)
class _WeightSource:
    """The weights behind their cache. `names`: the names of the units, by `Unit.order`."""

    names: Sequence[str]
    weights: Mapping[int, SsdWeights]
    what: str = "weights"

    def load(self, order: int, buffer: torch.Tensor) -> None:
        self.weights[order].load(buffer)

    def owner(self, order: int) -> str:
        return self.names[order]


@dataclass(frozen=True)
class _ChunkSource:
    """The optimizer states behind their cache. `names`: the names of the units, by `Unit.order`."""

    names: Sequence[str]
    optimizer: Mapping[int, SsdOptimizerStates]
    what: str = "optimizer states"

    def load(self, key: ChunkKey, buffer: torch.Tensor) -> None:
        self.optimizer[key[0]].load(key[1], buffer)

    def owner(self, key: ChunkKey) -> str:
        return f"{self.names[key[0]]}, chunk {key[1]}"


class SsdStates:
    """The states on SSD. `close` closes `store`. The buffers come last (`provide`): until the units have their states,
    host memory still has the model's own weights.

    The window tells which blocks come next (`ds_slide.runtime.weights.window.Ahead`)."""

    def __init__(
        self,
        store: SsdStore,
        failures: Failures,
        update_order: Iterable[ChunkKey],
        gradient: GradientBuffer,
        names: Sequence[str],
    ) -> None:
        """Begin without buffers. `names`: the names of the units, by `Unit.order`."""
        self.store = store
        self.parts = SsdParts()
        self.gradient = gradient
        self.chunks: BufferCache[ChunkKey] = BufferCache(
            _ChunkSource(names, self.parts.optimizer), failures, update_order
        )
        self.weights: BufferCache[int] = BufferCache(_WeightSource(names, self.parts.weights), failures)
        self.horizon = 0
        """Blocks whose weights may be read ahead."""

    def provide(self, chunk_buffers: BufferPool, weight_buffers: BufferPool) -> None:
        """Set the buffers, before `start`."""
        self.chunks.provide(chunk_buffers)
        self.weights.provide(weight_buffers)
        self.horizon = len(weight_buffers.addresses)

    def start(self) -> None:
        """Begin to read chunks ahead, in the order of the updates, whenever a buffer is free. So the disk does not stop
        between two steps."""
        self.chunks.read_ahead()

    def expect(self, coming: Sequence[Unit], in_backward: Sequence[Unit]) -> None:
        """Set the blocks whose weights are needed next in host memory, for the GPU or an update (`Ahead.expect`)."""
        # A block that is updated under backward needs its weights in host memory soon after the GPU has used them. The
        # GPU may have had them since forward. It must not make room.
        trained = [unit for unit in in_backward if unit.layout.trainable_numel]
        updated = [order for order in self._on_ssd(trained) if self.parts.weights[order].urgent]
        self.weights.expect([*updated, *(order for order in self._on_ssd(coming) if order not in updated)], updated)

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
