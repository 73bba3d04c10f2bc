"""Inputs of recomputed blocks that wait in host memory, by the engine's own functions, from predicted figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from ds_slide.plan.forecast import Room
from ds_slide.plan.memory import SPARE_HOST_SHARE, Plan
from ds_slide.plan.spare import Input, moved_within, moves_unmeasured
from ds_slide.plan.trace import StepTrace


@dataclass(frozen=True)
class Inputs:
    """What checkpointing saves of the blocks that the engine has taken over. `limit`: of `ds_slide.host_memory`."""

    blocks: tuple[Input, ...]
    plan: Plan
    room: Room
    limit: int | None

    @classmethod
    def of(cls, trace: StepTrace, taken_over: Collection[int], plan: Plan, room: Room, limit: int | None) -> Inputs:
        """`trace`: of a step that recomputes these blocks: what the forward of one leaves behind is its input."""
        kept: Counter[int] = Counter()
        for segment in trace.forward:
            if segment.unit is not None and segment.unit in taken_over:
                kept[segment.unit] += segment.kept_bytes
        return cls(tuple(Input(order, kept[order]) for order in sorted(taken_over)), plan, room, limit)

    def unmeasured(self) -> frozenset[int]:
        """Blocks whose inputs move in the first steps, when nobody knows what a batch needs."""
        if self.room.gpu_for_plan is None:
            return frozenset()
        total = sum(each.nbytes for each in self.blocks)
        if not moves_unmeasured(total, self.room.gpu_for_plan - self.plan.gpu_bytes):
            return frozenset()
        return moved_within(math.inf, self._host_bytes(), self.blocks)

    def within(self, missing: float) -> frozenset[int]:
        """Blocks whose inputs move so that `missing` bytes of the GPU come free."""
        return moved_within(missing, self._host_bytes(), self.blocks)

    def nbytes(self, moved: Collection[int]) -> int:
        return sum(each.nbytes for each in self.blocks if each.order in moved)

    def _host_bytes(self) -> float:
        free = SPARE_HOST_SHARE * (self.room.host_for_plan - self.plan.host_bytes)
        return max(0.0, free if self.limit is None else min(free, self.limit - self.plan.host_bytes))
