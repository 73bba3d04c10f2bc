"""Which states on SSD a step reads again, and how far the disk gets ahead of the updates.

An updated chunk stays in its host buffer until another chunk needs the buffer. The chunk that is needed last is evicted
first (`ds_slide.runtime.ssd.buffers`). So the chunks that are updated first stay for good, in the buffers that no chunk
on its way takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_slide.plan.allocations import CHUNK_BUFFERS
from ds_slide.plan.memory import Plan
from ds_slide.plan.needs import UnitSize

UNITS_UNDER_WAY = 2
"""Units whose chunks are on the way at once where the disk holds up the updates: one is read, because its weights are
waited for, and one is written. With 16 buffers and units of 2 chunks, 6 of 18 chunks and 43 of 53 were read in a step,
so that 12 and 10 had stayed (benchmarks/results/2026-11-24_nvidia-h200_hand-sweep.jsonl). With units of 6
chunks 117 of 120 and all of 197 were read (2026-11-21_nvidia-h200_ssd-1.5b_huge-pages.jsonl)."""


@dataclass(frozen=True)
class StatesOnSsd:
    """`read`: bytes of each unit's states that a step reads, by the index of the unit. `ahead`: bytes that the disk can
    have read and written for updates that are not ready yet."""

    read: Mapping[int, int]
    ahead: int

    @classmethod
    def of(cls, plan: Plan) -> StatesOnSsd:
        """Return the figures of a steady step; zeros where no states are on SSD."""
        placement, needs = plan.placement, plan.needs
        on_ssd = placement.chunks_on_ssd - placement.on_gpu - placement.promoted
        if needs.ssd is None or not on_ssd:
            return cls({}, 0)
        buffers = next(each for each in plan.allocations if each.what == CHUNK_BUFFERS)
        numel = needs.ssd.chunk_numel
        chunks = {index: -(-plan.units[index].codec.numel // numel) for index in on_ssd}
        order = _in_order(plan.units, on_ssd, by_deadline=bool(needs.held_bytes))
        stay = _that_stay([chunks[index] for index in order], buffers.count)
        read = {}
        for index in order:
            unit = plan.units[index]
            here = min(stay, chunks[index])
            stay -= here
            read[index] = unit.state_bytes * max(0, unit.codec.numel - here * numel) // unit.codec.numel
        # Each buffer counts twice: a chunk of the step before is written from it, and another chunk is read into it.
        return cls(read, 2 * buffers.nbytes)


def _that_stay(chunks: Sequence[int], buffers: int) -> int:
    """Return how many chunks stay in their buffers from step to step. `chunks`: counts by unit, in update order."""
    if sum(chunks) <= buffers:
        return buffers
    # The first chunks of the first unit, an embedding for instance, are in buffers. Its other chunks displace some.
    under_way = max(chunks[0] - buffers, UNITS_UNDER_WAY * max(chunks[1:], default=0))
    return max(0, buffers - under_way)


def _in_order(units: Sequence[UnitSize], chosen: frozenset[int], *, by_deadline: bool) -> list[int]:
    """Return the indices in the order of their updates: by deadline, or as backward finishes them."""
    if by_deadline:
        return sorted(chosen)
    return sorted(chosen, key=lambda index: (units[index].is_outer, -index))
