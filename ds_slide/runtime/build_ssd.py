"""Builds the SSD tier of a runtime: the state files, every unit's place in them, the pools in front of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ds_slide.plan.allocations import CHECKSUMS, CHUNK_BUFFERS, GRADIENT_BUFFER, WEIGHT_BUFFERS, state_buffer_of, total
from ds_slide.plan.host_room import local_ranks
from ds_slide.plan.ssd_settings import SsdSettings
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.pool import BufferPool
from ds_slide.runtime.core.settings import RuntimeSettings, UnitPlan
from ds_slide.runtime.core.stream_lane import Delay
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.ssd.space import SpaceOnSsd
from ds_slide.runtime.ssd.ssd import SsdStates
from ds_slide.runtime.weights.window import Ahead
from ds_slide.store.ssd.extents import PAGE, UnitExtents, unit_extents
from ds_slide.store.ssd.page_sums import PageSums
from ds_slide.store.ssd.store import STATE_FILE, SsdStore
from ds_slide.store.ssd.unit import ChunkKey, HeldOnSsd, SsdOptimizerStates, SsdWeights, in_one_piece

INPUT = "the input of a block"


def open_ssd(context: Context, unit_plans: Sequence[UnitPlan]) -> SsdStates | None:
    """Make the state files and the units' parts of them, without the buffers in front of them. Returns None where all
    states are in memory."""
    settings, failures, nbytes = context.settings, context.failures, total(context.plan.allocations, "ssd")
    if not nbytes or settings.ssd is None:
        return None
    extents, end = {}, 0
    for order in sorted(context.plan.placement.on_ssd):
        extents[order] = _extents(context, unit_plans[order], order, end, settings.ssd.chunk_numel)
        end = extents[order].end
    assert end == nbytes
    table = context.allocator.tensor(CHECKSUMS, torch.int32) if settings.slide.checksums else None
    what_lies_at = _what_lies_at([(unit_plans[order].spec.name, place) for order, place in extents.items()])
    store = _open_store(context, settings.ssd, STATE_FILE, nbytes, table, what_lies_at)
    cycle = _update_order(unit_plans, extents, under_backward=settings.held_dtype is None)
    names = [unit_plan.spec.name for unit_plan in unit_plans]
    ssd = SsdStates(store, failures, cycle, context.recorder.meters["update"], names)
    for order, places in extents.items():
        _add_unit(context, ssd, unit_plans[order], order, places)
    return ssd


def _open_store(
    context: Context,
    ssd: SsdSettings,
    name: str,
    nbytes: int,
    table: torch.Tensor | None,
    what_lies_at: Callable[[int], str],
) -> SsdStore:
    """Open a store of the SSD tier. `name`: the name of its files. `table`: the table of checksums."""
    settings, failures = context.settings, context.failures
    store = SsdStore(
        ssd.parents,
        nbytes,
        name=name,
        fail=lambda error: failures.record("ssd", error),
        backend=settings.slide.io_backend,
        queue_depth=ssd.queue_depth,
        request_bytes=ssd.request_bytes,
        sums=None if table is None else PageSums(table, context.cpu_threads),
        what_lies_at=what_lies_at,
        delay=Delay(settings.slide.debug.lane_delay_ms, settings.slide.debug.seed + 4),
        waiting=failures.waiting,
    )
    context.stores.append(store)
    return store


def space_for_inputs(context: Context) -> SpaceOnSsd | None:
    """Make the space besides the states; None where the JSON opens no SSD tier."""
    if (ssd := context.settings.ssd) is None:
        return None

    def open_store(name: str, nbytes: int, table: torch.Tensor | None) -> SsdStore:
        store = _open_store(context, ssd, name, nbytes, table, lambda _: INPUT)
        context.recorder.watch_ssd(store)
        return store

    def make_table(nbytes: int) -> torch.Tensor | None:
        if not context.settings.slide.checksums:
            return None
        return context.memory.tensor(nbytes // PAGE, torch.int32, transfers=False)

    return SpaceOnSsd(context.stores, open_store, make_table, [path for _, path in ssd.parents], local_ranks())


def _add_unit(context: Context, ssd: SsdStates, unit_plan: UnitPlan, order: int, places: UnitExtents) -> None:
    settings, requests, store = context.settings, context.recorder.requests, ssd.store
    if (offset := places.weight_offset) is not None:
        buffer = in_one_piece(store, unit_plan.dtype, places.weight_bytes // unit_plan.dtype.itemsize, offset)
        # Backward waits for updates that run under it (for gradient buffers), never for updates under the next forward.
        urgent = settings.held_dtype is None
        ssd.parts.weights[order] = SsdWeights(order, buffer, ssd.weights, urgent, requests)
    if places.chunks:
        specs = unit_plan.specs(settings)
        ssd.parts.optimizer[order] = SsdOptimizerStates(
            order, store, specs, places.chunks, ssd.chunks, ssd.weights, requests
        )
    held = settings.held_of(unit_plan.spec.precision)
    if (offset := places.gradient_offset) is not None and held is not None:
        buffer = in_one_piece(store, held, unit_plan.codec.numel, offset)
        ssd.parts.gradients[order] = HeldOnSsd(buffer, ssd.gradient)


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


def _what_lies_at(extents: Sequence[tuple[str, UnitExtents]]) -> Callable[[int], str]:
    """Return a function that names the content at an offset. `extents`: the extents with the names of their units, in
    the order of their offsets."""

    def what(offset: int) -> str:
        found = next(((name, place) for name, place in extents if offset < place.end), None)
        return INPUT if found is None else f"{found[1].what_lies_at(offset)} of {found[0]}"

    return what


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


@dataclass(frozen=True)
class _ReadAhead:
    """Tells the SSD tier which blocks come next (`ds_slide.runtime.weights.window.Ahead`)."""

    ssd: SsdStates
    under_backward: bool
    """Whether weights are updated under backward."""

    @property
    def horizon(self) -> int:
        return self.ssd.ahead

    def expect(self, coming: Sequence[Unit], in_backward: Sequence[Unit]) -> None:
        if not self.under_backward:
            self.ssd.expect_weights(coming, ())
            return
        # A block that is updated under backward needs its weights in host memory soon after the GPU has used them. The
        # GPU may have had them since forward.
        updated = [unit for unit in in_backward if unit.layout.trainable_numel]
        self.ssd.expect_weights([*updated, *(unit for unit in coming if unit not in updated)], updated)


def read_ahead(ssd: SsdStates | None, settings: RuntimeSettings) -> Ahead | None:
    """Return the receiver of the window's next blocks; None where no weights are read ahead."""
    if ssd is None or not ssd.ahead:
        return None
    return _ReadAhead(ssd, under_backward=settings.held_dtype is None)
