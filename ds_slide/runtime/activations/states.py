"""The states of a running engine as candidates for spare GPU memory."""

from __future__ import annotations

from ds_slide.plan.allocations import disk_share, movable_order, slot_bytes
from ds_slide.plan.spare import NO_SLOTS, Movable, Slots, least_slots
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.tier_moves import gpu_cost, move, why_fixed
from ds_slide.runtime.unit import Unit


class RunningStates:
    """Of the units that may move, in the order of `movable_order`."""

    def __init__(self, runtime: SlideRuntime) -> None:
        self._runtime = runtime
        plan = runtime.parts.plan
        self._least = least_slots(plan.placement.window, plan.needs)

    def movable(self) -> list[Movable]:
        """Those in host memory and on SSD."""
        updated = sum(unit.codec.numel for unit in self._runtime.units if unit.is_uploaded)
        units = [unit for unit in self._in_order() if unit.is_uploaded and why_fixed(self._runtime, unit) is None]
        return [self._movable(unit, updated) for unit in units if unit.trainable]

    def promoted(self) -> list[Movable]:
        """Those on the GPU."""
        promoted = self._runtime.parts.plan.placement.promoted
        updated = sum(unit.codec.numel for unit in self._runtime.units)
        return [self._movable(unit, updated) for unit in self._in_order() if unit.order in promoted]

    def slots(self, forwards: int) -> Slots:
        """Of the window, which serves so many forwards a step. One whose size the user has set stays as it is."""
        plan, window = self._runtime.parts.plan, self._runtime.parts.window
        if window is None:
            return NO_SLOTS
        blocks = sum(unit.is_streamed for unit in self._runtime.units)
        nbytes = slot_bytes(plan.units, plan.needs, plan.placement)
        return Slots(len(window.slots), self._least, nbytes, blocks, 2 * forwards)

    def may_move(self) -> bool:
        """Whether this is the moment for it: nothing is accumulated, and no graph waits for its backward."""
        return self._runtime.interruptions.is_between_steps()

    def move(self, orders: frozenset[int], slots: int | None = None) -> bool:
        """Make them the promoted ones, as far as there is memory, and the window one of so many slots at most; None: as
        many as now; never fewer than the least. -> whether this was the moment. Collective."""
        window = self._runtime.parts.window
        if slots is None:
            slots = 0 if window is None else len(window.slots)
        on_gpu = orders | self._runtime.parts.plan.placement.on_gpu
        return move(self._runtime, on_gpu, slots=max(slots, self._least)) is not None

    def _in_order(self) -> list[Unit]:
        plan = self._runtime.parts.plan
        return sorted(
            self._runtime.units, key=lambda unit: movable_order(unit.order, plan.units[unit.order], plan.placement)
        )

    def _movable(self, unit: Unit, updated: int) -> Movable:
        plan, share, streamed = self._runtime.parts.plan, unit.codec.numel / max(updated, 1), unit.spec.kind == "block"
        of_disk = disk_share(unit.order, plan.units, plan.needs, plan.placement)
        return Movable(unit.order, gpu_cost(self._runtime, unit), share, streamed, of_disk)
