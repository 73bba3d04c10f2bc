"""The states of a running engine as candidates for spare GPU memory."""

from __future__ import annotations

from ds_slide.plan.spare import Movable
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.tier_moves import gpu_cost, move, why_fixed
from ds_slide.runtime.unit import Unit


class RunningStates:
    """Of the units that may move: outer modules first, whose updates nothing hides, then blocks in their order."""

    def __init__(self, runtime: SlideRuntime) -> None:
        self._runtime = runtime

    def movable(self) -> list[Movable]:
        """Those in host memory."""
        updated = sum(unit.codec.numel for unit in self._runtime.units if unit.is_uploaded)
        units = [unit for unit in self._in_order() if unit.is_uploaded and why_fixed(self._runtime, unit) is None]
        return [self._movable(unit, updated) for unit in units if unit.trainable]

    def promoted(self) -> list[Movable]:
        """Those on the GPU."""
        promoted = self._runtime.parts.plan.placement.promoted
        updated = sum(unit.codec.numel for unit in self._runtime.units)
        return [self._movable(unit, updated) for unit in self._in_order() if unit.order in promoted]

    def move(self, orders: frozenset[int]) -> bool:
        """Make them the promoted ones, as far as there is memory. -> whether this was the moment. Collective."""
        return move(self._runtime, orders | self._runtime.parts.plan.placement.on_gpu) is not None

    def _in_order(self) -> list[Unit]:
        return sorted(self._runtime.units, key=lambda unit: (unit.spec.kind != "outer", unit.order))

    def _movable(self, unit: Unit, updated: int) -> Movable:
        return Movable(unit.order, gpu_cost(self._runtime, unit), unit.codec.numel / max(updated, 1))
