"""Inputs of recomputed blocks that wait in host memory or on SSD. The engine's own functions choose them, from
predicted figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from ds_slide.plan.allocations import total
from ds_slide.plan.forecast import ActivationPlan, Room
from ds_slide.plan.memory import SPARE_HOST_SHARE, Plan
from ds_slide.plan.spare import (
    LEAST_AHEAD,
    SPARE_SSD_SHARE,
    Input,
    buffers_for,
    goes_on,
    inputs_to_move,
    movable_inputs,
    moves_unmeasured,
)
from ds_slide.plan.trace import StepTrace


@dataclass(frozen=True)
class Inputs:
    """The inputs that checkpointing saves of the blocks that the engine has taken over. `limit`:
    `ds_slide.host_memory`."""

    blocks: tuple[Input, ...]
    plan: Plan
    room: Room
    limit: int | None
    has_ssd: bool

    @classmethod
    def of(
        cls,
        trace: StepTrace,
        taken_over: Collection[int],
        plan: Plan,
        room: Room,
        limit: int | None,
        *,
        has_ssd: bool,
    ) -> Inputs:
        """Return the inputs of the blocks `taken_over`. `trace`: a step that recomputes these blocks, so that a block's
        forward leaves only its input. `has_ssd`: the JSON opens an SSD tier."""
        kept: Counter[int] = Counter()
        for segment in trace.forward:
            if segment.unit is not None and segment.unit in taken_over:
                kept[segment.unit] += segment.kept_bytes
        blocks = tuple(Input(order, kept[order]) for order in sorted(taken_over))
        return cls(blocks, plan, room, limit, has_ssd)

    def unmeasured(self, activations: ActivationPlan) -> ActivationPlan:
        """Return `activations` with the inputs that move in the first steps, before a batch's need is known."""
        if self.room.gpu_for_plan is None:
            return activations
        nbytes = sum(each.nbytes for each in self.blocks)
        free = self.room.gpu_for_plan - self.plan.gpu_bytes
        return self.within(math.inf, activations) if moves_unmeasured(nbytes, free) else activations

    def within(self, missing: float, activations: ActivationPlan) -> ActivationPlan:
        """Return `activations` with the inputs that move so that `missing` bytes of the GPU come free."""
        orders = inputs_to_move(missing, self.blocks, self)
        moved = [each for each in self.blocks if each.order in orders]
        nbytes = sum(each.nbytes for each in moved)
        gone, buffers = frozenset[int](), 0
        if nbytes > self.on_host(nbytes):
            buffers = self._buffer_bytes(max(each.nbytes for each in movable_inputs(self.blocks)))
            gone = goes_on(moved, self._host_bytes(buffers))
        return replace(
            activations,
            moved=orders,
            moved_bytes=nbytes,
            on_ssd=gone,
            on_ssd_bytes=sum(each.nbytes for each in moved if each.order in gone),
            buffer_bytes=buffers if gone else 0,
        )

    def on_host(self, _wanted: int) -> float:
        """Return the bytes of host memory for inputs (`Places`)."""
        return self._host_bytes(0)

    def on_ssd(self, _wanted: int, input_bytes: int) -> float:
        """Return the bytes of SSD for inputs of at most `input_bytes` each (`Places`)."""
        has_room = self.has_ssd and self._buffer_bytes(input_bytes) <= self._free_host_bytes(0)
        return self._ssd_bytes() if has_room else 0.0

    def _buffer_bytes(self, input_bytes: int) -> int:
        """Return the bytes of host buffers for inputs of `input_bytes` on their way to SSD and back."""
        return buffers_for(LEAST_AHEAD) * input_bytes

    def _host_bytes(self, buffers: int) -> float:
        """Return the host bytes for inputs, beside `buffers` bytes for inputs on SSD, which no limit of the JSON
        counts."""
        free = self._free_host_bytes(buffers)
        return max(0.0, free if self.limit is None else min(free, self.limit - self.plan.host_bytes))

    def _free_host_bytes(self, buffers: int) -> float:
        return SPARE_HOST_SHARE * (self.room.host_for_plan - self.plan.host_bytes - buffers)

    def _ssd_bytes(self) -> float:
        if self.room.ssd is None:
            return math.inf
        return max(0.0, SPARE_SSD_SHARE * (self.room.ssd / self.room.ranks - total(self.plan.allocations, "ssd")))
