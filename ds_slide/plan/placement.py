"""Which states stay in host memory and which go to SSD: unit by unit, as far as the memory reaches.

Memory goes first to what saves most SSD traffic per byte: a block's weights (2 bytes a parameter save 6 a step: two
reads and a write), then the edges' optimizer states (their update is the one that nothing hides) and, few as they are,
those of the blocks' parts in another data type (`ds_slide.model.structure`), then those of the
blocks (10 bytes save 20). What stays is spread evenly over the blocks, so that the disk has work all through the step
instead of a burst at one end of the model.

Held gradients are the last to leave, and only those of blocks: one of 2 bytes is written and read in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ds_slide.model.layout import UnitLayout
from ds_slide.store.planes import PlaneSpec, optimizer_bytes
from ds_slide.store.ssd.places import record_bytes, sum_table_bytes, whole_pages

# Of the free memory: Python's objects, the data loader and the page cache go on growing after the plan is made.
USABLE_SHARE = 0.95
MOST_RECORD_BUFFERS = 16
EXTRA_WEIGHT_BUFFERS = 4
"""Beside one for each slot: read ahead, under update, being written."""


@dataclass(frozen=True)
class UnitSize:
    """What the plan knows of a unit. The weights of edges and parts of blocks are always in host memory, and on the GPU
    as well unless they pass through it. `specs`: the optimizer planes. Item sizes in bytes."""

    name: str
    layout: UnitLayout
    kind: Literal["block", "part", "edge"]
    specs: Sequence[PlaneSpec]
    weight_bytes: int
    passing_numel: int = 0
    """Elements of the GPU buffers through which an edge passes in chunks; 0 where it is there as a whole."""
    gradient_bytes: int | None = None
    """None: as `Needs` has it."""
    held_bytes: int | None = None
    """Likewise."""

    @property
    def is_edge(self) -> bool:
        return self.kind == "edge"

    @property
    def stays(self) -> bool:
        """Whether its weights do not pass through the window."""
        return self.kind != "block"


@dataclass(frozen=True)
class SsdNeeds:
    """`weights`, `records`: what may go to SSD; where records may, held gradients may as well. Numbers of buffers: None
    is automatic."""

    weights: bool
    records: bool
    chunk_numel: int
    record_buffers: int | None = None
    weight_buffers: int | None = None
    checksums: bool = False
    """Whether a sum of every page on SSD is kept in host memory."""


@dataclass(frozen=True)
class Needs:
    """Storage settings that set the bytes. Item sizes in bytes, of gradients for units that have none of their own."""

    gradient_bytes: int
    held_bytes: int
    """Bytes a parameter of a held host gradient; 0 when gradients are not held."""
    window: int
    """Slots, at least."""
    stagings: int
    ring: int
    """Buffers through which the gradients of blocks pass, and one for edges; 0 when they need none in host memory."""
    ring_to_ssd: int = 0
    """Where `ring` is 0: buffers through which they pass when some of them are held on SSD."""
    world_size: int = 1
    shares_weights: bool = False
    """Several ranks read each other's weights in host memory; otherwise all units are gathered."""
    ssd: SsdNeeds | None = None
    """None: there is no SSD tier."""
    window_grows: bool = False
    """Whether spare GPU memory becomes slots."""
    trains: bool = True
    """False: nothing is updated, so that there are weights only."""


@dataclass(frozen=True)
class HostPlacement:
    """Indices of the units with weights, optimizer states (records) or held gradients on SSD; sizes of the pools in
    front of it."""

    weights_on_ssd: frozenset[int]
    records_on_ssd: frozenset[int]
    gradients_on_ssd: frozenset[int]
    record_buffers: int
    weight_buffers: int
    state_bytes: int
    """States in host memory."""
    ssd_bytes: int
    """States and held gradients on SSD."""
    host_bytes: int
    """States, held gradients, buffers and checksums in host memory."""


def place_on_host(
    units: Sequence[UnitSize], needs: Needs, on_gpu: frozenset[int], host_free: int, host_memory: int | None
) -> HostPlacement:
    """Place what is not on the GPU. `host_memory`: budget in bytes of the states, None for what `host_free` leaves."""
    on_host = [index for index in range(len(units)) if index not in on_gpu]
    around = _gradient_bytes(units, needs, on_host, frozenset())
    everything = sum(_weights(units[i]) + _records(units[i]) for i in on_host)
    usable = int(host_free * USABLE_SHARE) - around
    if needs.ssd is None or everything <= (usable if host_memory is None else min(usable, host_memory)):
        return HostPlacement(frozenset(), frozenset(), frozenset(), 0, 0, everything, 0, everything + around)

    ssd = needs.ssd
    may_move_weights = [i for i in on_host if ssd.weights and not units[i].stays]
    may_move_records = [i for i in on_host if ssd.records and units[i].layout.trainable_numel]
    pools = _pool_bytes(units, needs, ssd, may_move_weights, may_move_records)
    movable = sum(_weights(units[i]) for i in may_move_weights)
    movable += sum(_records(units[i]) for i in may_move_records)
    # With the sums of all that may go there: what stays after all leaves a little of that unused.
    reserved = sum(pools) + _sum_bytes(units, needs, ssd, may_move_weights, may_move_records, ())
    gradients: frozenset[int] = frozenset()
    if ssd.records and everything - movable + reserved > usable:
        reserved += _sum_bytes(units, needs, ssd, (), (), _may_leave(units, needs, on_host))
        free = int(host_free * USABLE_SHARE) - (everything - movable) - reserved
        gradients = _gradients_that_leave(units, needs, on_host, free)
        around = _gradient_bytes(units, needs, on_host, gradients)
        usable = int(host_free * USABLE_SHARE) - around
    budget = max(0, usable - reserved) if host_memory is None else min(host_memory, max(0, usable - reserved))
    left = budget - everything + movable

    def stay(candidates: Sequence[int], size: Callable[[UnitSize], int]) -> set[int]:
        nonlocal left
        kept = _spread([(i, size(units[i])) for i in candidates], left)
        left -= sum(size(units[i]) for i in kept)
        return kept

    weights_stay = stay(may_move_weights, _weights)
    records_stay = stay([i for i in may_move_records if units[i].stays], _records)
    records_stay |= stay([i for i in may_move_records if not units[i].stays], _records)
    weights = frozenset(may_move_weights) - weights_stay
    records = frozenset(may_move_records) - records_stay
    moved = sum(_weights(units[i]) for i in weights) + sum(_records(units[i]) for i in records)
    buffers = _pool_bytes(units, needs, ssd, weights, records)
    return HostPlacement(
        weights,
        records,
        gradients,
        _record_buffers(units, ssd, records),
        _weight_buffers(needs, ssd, weights),
        everything - moved,
        moved + sum(_held(units[i], needs) for i in gradients),
        everything - moved + around + sum(buffers) + _sum_bytes(units, needs, ssd, weights, records, gradients),
    )


def _weights(unit: UnitSize) -> int:
    return unit.layout.local_numel * unit.weight_bytes


def _records(unit: UnitSize) -> int:
    return optimizer_bytes(unit.specs, unit.layout.trainable_numel)


def gradient_item(unit: UnitSize, needs: Needs) -> int:
    """Bytes of an element of the unit's gradient on its way."""
    return needs.gradient_bytes if unit.gradient_bytes is None else unit.gradient_bytes


def held_item(unit: UnitSize, needs: Needs) -> int:
    """Bytes of an element of the unit's held gradient; 0 when gradients are not held."""
    return needs.held_bytes if unit.held_bytes is None else unit.held_bytes


def _held(unit: UnitSize, needs: Needs) -> int:
    return unit.layout.trainable_numel * held_item(unit, needs)


def _passing(unit: UnitSize, needs: Needs) -> int:
    """Bytes of the unit's gradient on its way."""
    return unit.layout.trainable_numel * gradient_item(unit, needs)


def _gradients_that_leave(units: Sequence[UnitSize], needs: Needs, on_host: Sequence[int], free: int) -> frozenset[int]:
    """Blocks whose held gradients go to SSD so that the others', and what the way there takes, need `free` bytes."""
    blocks = _may_leave(units, needs, on_host)
    free -= _gradient_bytes(units, needs, on_host, frozenset(blocks))
    return frozenset(blocks) - _spread([(i, _held(units[i], needs)) for i in blocks], free)


def _may_leave(units: Sequence[UnitSize], needs: Needs, on_host: Sequence[int]) -> list[int]:
    """Blocks whose held gradients may go to SSD."""
    return [i for i in on_host if not units[i].stays and _held(units[i], needs)]


def _sum_bytes(
    units: Sequence[UnitSize],
    needs: Needs,
    ssd: SsdNeeds,
    weights: Sequence[int] | frozenset[int],
    records: Sequence[int] | frozenset[int],
    gradients: Sequence[int] | frozenset[int],
) -> int:
    """Of the checksums of these units' weights, records and held gradients."""
    if not ssd.checksums:
        return 0
    pages = sum(whole_pages(_weights(units[i])) for i in weights)
    for i in records:
        full, rest = divmod(units[i].layout.trainable_numel, ssd.chunk_numel)
        pages += full * record_bytes(units[i].specs, ssd.chunk_numel) + record_bytes(units[i].specs, rest)
    return sum_table_bytes(pages + sum(whole_pages(_held(units[i], needs)) for i in gradients))


def _spread(sizes: Sequence[tuple[int, int]], budget: int) -> set[int]:
    """Indices that together take at most `budget` bytes, at even distances."""
    total = sum(size for _, size in sizes)
    if total <= budget:
        return {index for index, _ in sizes}
    kept: set[int] = set()
    used = passed = 0
    for index, size in sizes:
        passed += size
        # Exact integers: a share in floating point would depend on the order of the sum.
        if (used + size) * total <= passed * max(budget, 0):
            kept.add(index)
            used += size
    return kept


def _gradient_bytes(units: Sequence[UnitSize], needs: Needs, on_host: Sequence[int], on_ssd: frozenset[int]) -> int:
    """Held gradients and the buffers of all gradients in host memory, with the held ones of `on_ssd` on SSD."""
    held = sum(_held(units[i], needs) for i in on_host if i not in on_ssd)
    ring = needs.ring
    buffer = max((_passing(units[i], needs) for i in on_host if not units[i].is_edge), default=0)
    edges = max((_passing(units[i], needs) for i in on_host if units[i].is_edge), default=0)
    if on_ssd:
        ring, buffer = needs.ring or needs.ring_to_ssd, whole_pages(buffer)  # written from where they arrive
        held += max(whole_pages(_held(units[i], needs)) for i in on_ssd)  # where they are added up and read back
    return held + ring * buffer + (edges if needs.ring else 0)


def _pool_bytes(
    units: Sequence[UnitSize],
    needs: Needs,
    ssd: SsdNeeds,
    weights: Sequence[int] | frozenset[int],
    records: Sequence[int] | frozenset[int],
) -> tuple[int, int]:
    plane = max((whole_pages(_weights(units[i])) for i in weights), default=0)
    chunk = max(
        (record_bytes(units[i].specs, min(ssd.chunk_numel, units[i].layout.trainable_numel)) for i in records),
        default=0,
    )
    return _weight_buffers(needs, ssd, weights) * plane, _record_buffers(units, ssd, records) * chunk


def _weight_buffers(needs: Needs, ssd: SsdNeeds, weights: Sequence[int] | frozenset[int]) -> int:
    wanted = needs.window + EXTRA_WEIGHT_BUFFERS if ssd.weight_buffers is None else ssd.weight_buffers
    return min(wanted, len(weights))


def _record_buffers(units: Sequence[UnitSize], ssd: SsdNeeds, records: Sequence[int] | frozenset[int]) -> int:
    wanted = MOST_RECORD_BUFFERS if ssd.record_buffers is None else ssd.record_buffers
    return min(wanted, sum(-(-units[i].layout.trainable_numel // ssd.chunk_numel) for i in records))
