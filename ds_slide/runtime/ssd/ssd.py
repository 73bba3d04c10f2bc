"""The SSD tier of an engine: the state files with the place of every unit, the host buffers in front of them, and the
read-ahead.

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

from ds_slide.plan.allocations import CHECKSUMS, CHUNK_BUFFERS, GRADIENT_BUFFER, WEIGHT_BUFFERS, state_buffer_of, total
from ds_slide.plan.host_room import local_ranks
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.pool import BufferPool
from ds_slide.runtime.core.settings import UnitPlan
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.ssd.buffers import BufferCache
from ds_slide.runtime.ssd.space import INPUTS, SpaceOnSsd, StoreMaker
from ds_slide.store.ssd.extents import Contents, UnitExtents, unit_extents
from ds_slide.store.ssd.store import STATE_FILE, SsdStore
from ds_slide.store.ssd.unit import (
    ChunkKey,
    GradientBuffer,
    HeldOnSsd,
    SsdOptimizerStates,
    SsdWeights,
    in_one_piece,
)


@dataclass(frozen=True)
class UnitsOnSsd:
    """The state buffers of units on SSD, by `Unit.order`."""

    weights: dict[int, SsdWeights] = field(default_factory=dict)
    optimizer: dict[int, SsdOptimizerStates] = field(default_factory=dict)
    gradients: dict[int, HeldOnSsd] = field(default_factory=dict)


@dataclass(frozen=True)
class _WeightLoader:
    """Reads the weights behind their cache. `names`: the names of the units, by `Unit.order`."""

    names: Sequence[str]
    weights: Mapping[int, SsdWeights]
    what: str = "weights"

    def load(self, order: int, buffer: torch.Tensor) -> None:
        self.weights[order].load(buffer)

    def owner(self, order: int) -> str:
        return self.names[order]


@dataclass(frozen=True)
class _ChunkLoader:
    """Reads the optimizer states behind their cache. `names`: the names of the units, by `Unit.order`."""

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
        self.units = UnitsOnSsd()
        self.gradient = gradient
        self.chunks: BufferCache[ChunkKey] = BufferCache(
            _ChunkLoader(names, self.units.optimizer), failures, update_order
        )
        self.weights: BufferCache[int] = BufferCache(_WeightLoader(names, self.units.weights), failures)
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
        updated = [order for order in self._on_ssd(trained) if self.units.weights[order].urgent]
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
        return [unit.order for unit in units if unit.order in self.units.weights]


# ----------------------------------------------------------------------------------------------------------------------
# How the builder makes it.


def open_ssd(context: Context, unit_plans: Sequence[UnitPlan]) -> SsdStates | None:
    """Make the state files and the units' parts of them, without the buffers in front of them. Returns None where all
    states are in memory."""
    settings, nbytes = context.settings, total(context.plan.allocations, "ssd")
    if not nbytes or settings.ssd is None:
        return None
    extents, end = {}, 0
    for order in sorted(context.plan.placement.on_ssd):
        extents[order] = _extents(context, unit_plans[order], order, end, settings.ssd.chunk_numel)
        end = extents[order].end
    assert end == nbytes
    names = [unit_plan.spec.name for unit_plan in unit_plans]
    table = context.allocator.tensor(CHECKSUMS, torch.int32) if settings.slide.checksums else None
    contents = Contents([(names[order], place) for order, place in extents.items()], INPUTS)
    store = StoreMaker(context, settings.ssd).open(STATE_FILE, nbytes, table, contents)
    cycle = _update_order(unit_plans, extents, under_backward=settings.held_dtype is None)
    gradient = GradientBuffer(context.recorder.meters["update"])
    ssd = SsdStates(store, context.failures, cycle, gradient, names)
    for order, places in extents.items():
        _add_unit(context, ssd, unit_plans[order], order, places)
    return ssd


def space_for_inputs(context: Context) -> SpaceOnSsd | None:
    """Make the space besides the states; None where the JSON opens no SSD tier."""
    ssd = context.settings.ssd
    return None if ssd is None else SpaceOnSsd(StoreMaker(context, ssd), local_ranks())


def _add_unit(context: Context, ssd: SsdStates, unit_plan: UnitPlan, order: int, places: UnitExtents) -> None:
    settings, requests, store = context.settings, context.recorder.requests, ssd.store
    if (offset := places.weight_offset) is not None:
        buffer = in_one_piece(store, unit_plan.dtype, places.weight_bytes // unit_plan.dtype.itemsize, offset)
        # Backward waits for updates that run under it (for gradient buffers), never for updates under the next forward.
        urgent = settings.held_dtype is None
        ssd.units.weights[order] = SsdWeights(order, buffer, ssd.weights, urgent, requests)
    if places.chunks:
        specs = unit_plan.specs(settings)
        ssd.units.optimizer[order] = SsdOptimizerStates(
            order, store, specs, places.chunks, ssd.chunks, ssd.weights, requests
        )
    held = settings.held_of(unit_plan.spec.precision)
    if (offset := places.gradient_offset) is not None and held is not None:
        buffer = in_one_piece(store, held, unit_plan.codec.numel, offset)
        ssd.units.gradients[order] = HeldOnSsd(buffer, ssd.gradient)


def _update_order(
    unit_plans: Sequence[UnitPlan], extents: Mapping[int, UnitExtents], *, under_backward: bool
) -> list[ChunkKey]:
    """Return the chunks as their updates become ready: by deadline, or in the order of backward."""
    orders = list(range(len(unit_plans)))
    if under_backward:
        outer = [order for order in orders if unit_plans[order].spec.kind == "outer"]
        blocks = [order for order in reversed(orders) if order not in outer]
        # Backward finishes a streamed head before it comes to the blocks, and the other outer modules after them.
        first = [order for order in outer if unit_plans[order].chunk_rows]
        orders = [*first, *blocks, *(order for order in outer if order not in first)]
    return [(order, index) for order in orders if order in extents for index in range(len(extents[order].chunks))]


def _extents(context: Context, unit_plan: UnitPlan, order: int, start: int, chunk_numel: int) -> UnitExtents:
    """Return the extents of the unit's entries in the plan, from byte `start` on."""
    placement, allocator, specs = context.plan.placement, context.allocator, unit_plan.specs(context.settings)

    def nbytes(state_buffer: str, on_ssd: frozenset[int]) -> int:
        return allocator.on_ssd(state_buffer_of(unit_plan.spec.name, state_buffer)) if order in on_ssd else 0

    states = [nbytes(spec.name, placement.chunks_on_ssd) for spec in specs]
    extents = unit_extents(
        start,
        specs,
        weight_bytes=nbytes("weight", placement.weights_on_ssd),
        chunks_of=unit_plan.codec.numel if any(states) else 0,
        chunk_numel=chunk_numel,
        gradient_bytes=nbytes("gradient", placement.gradients_on_ssd),
    )
    nbytes("padding", placement.on_ssd)
    return extents


def provide_buffers(context: Context, ssd: SsdStates) -> None:
    """Make the pools in front of the disk. Weights are page-locked, because the GPU copies from them."""
    if context.plan.placement.gradients_on_ssd:
        # The update lane keeps this buffer as long as the engine lives: no other thread leases it.
        ssd.gradient.buffer = _pool(context, ssd.store, GRADIENT_BUFFER).lease().buffer
    ssd.provide(*(_pool(context, ssd.store, what) for what in (CHUNK_BUFFERS, WEIGHT_BUFFERS)))


def _pool(context: Context, store: SsdStore, what: str) -> BufferPool:
    pool = context.allocator.pool(what, context.failures)
    for address in pool.addresses:
        store.register(address, pool.buffer_bytes)
    return pool
