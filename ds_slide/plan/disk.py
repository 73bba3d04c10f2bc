"""What of the states on SSD a step reads again, and how far the disk gets ahead of the updates.

A chunk that has been updated stays in its host buffer until another one needs that, and what is needed last goes first
(`ds_slide.runtime.ssd.buffers`). So the chunks that come first in the order of the updates stay for good, in the
buffers that no chunk on its way takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_slide.plan.allocations import CHUNK_BUFFERS
from ds_slide.plan.memory import Plan
from ds_slide.plan.needs import UnitSize

UNITS_UNDER_WAY = 2
"""Units whose chunks are on the way at once where the disk holds up the updates: one that is read, because its weights
are waited for, and one that is written. With 16 buffers and units of 2 chunks 6 of 18 chunks and 43 of 53 were read in
a step, so that 12 and 10 had stayed (benchmarks/results/2026-11-24_nvidia-h200_hand-sweep.jsonl), with units of 6
chunks 117 of 120 and all of 197 (2026-11-21_nvidia-h200_ssd-1.5b_huge-pages.jsonl)."""


@dataclass(frozen=True)
class StatesOnSsd:
    """`read`: bytes that a step reads of each unit's states, by the number of the unit. `ahead`: bytes that the disk
    can have read and written for updates that are not ready yet."""

    read: Mapping[int, int]
    ahead: int

    @classmethod
    def of(cls, plan: Plan) -> StatesOnSsd:
        """Of a step like those before it. Nothing where no states are on SSD."""
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
        # Each buffer once for a chunk of the step before, which is written, and once for one that is read.
        return cls(read, 2 * buffers.nbytes)


def _that_stay(chunks: Sequence[int], buffers: int) -> int:
    """How many chunks stay in their buffers from step to step. `chunks`: of each unit, in the order of the updates."""
    if sum(chunks) <= buffers:
        return buffers
    # Of the first unit, an embedding for instance, the first chunks are there: those that are not displace others.
    under_way = max(chunks[0] - buffers, UNITS_UNDER_WAY * max(chunks[1:], default=0))
    return max(0, buffers - under_way)


def _in_order(units: Sequence[UnitSize], chosen: frozenset[int], *, by_deadline: bool) -> list[int]:
    """As they are updated: by deadline, or as backward finishes them."""
    if by_deadline:
        return sorted(chosen)
    return sorted(chosen, key=lambda index: (units[index].is_outer, -index))
