"""The states of a running engine as candidates for spare GPU memory."""

from __future__ import annotations

from ds_slide.plan.movable import movable_states, promoted_states, window_slots
from ds_slide.plan.spare import NO_SLOTS, Movable, Slots, least_slots
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.memory.tier_moves import move


class RunningStates:
    """The states of the units that may move, in the order of `movable_states`."""

    def __init__(self, runtime: SlideRuntime) -> None:
        self._runtime = runtime
        plan = runtime.parts.plan
        self._least = least_slots(plan.placement.window, plan.needs)

    def movable(self) -> list[Movable]:
        """Return the movable states in host memory and on SSD."""
        return movable_states(self._runtime.parts.plan)

    def promoted(self) -> list[Movable]:
        """Return the states that were promoted to the GPU."""
        return promoted_states(self._runtime.parts.plan)

    def slots(self, forwards: int) -> Slots:
        """Return the slots of the window, which serves `forwards` forwards a step."""
        parts = self._runtime.parts
        return NO_SLOTS if parts.window is None else window_slots(parts.plan, forwards)

    def may_park(self) -> bool:
        """Whether states on the GPU can make room for a forward or a backward under way."""
        return any(map(self._runtime.parked.may_park, self._runtime.units))

    def park(self) -> int:
        """Park the states of the unit that went to the GPU last and is not parked yet. -> bytes that have come free."""
        promoted = [self._runtime.units[each.order] for each in reversed(self.promoted())]
        unit = next(filter(self._runtime.parked.may_park, promoted), None)
        return 0 if unit is None else self._runtime.parked.park(unit)

    def may_move(self) -> bool:
        """Whether states may move now: nothing is accumulated, and no graph waits for its backward."""
        return self._runtime.interruptions.is_between_steps()

    def move(self, orders: frozenset[int], slots: int | None = None) -> bool:
        """Make `orders` the promoted units, as far as there is memory, and give the window at most `slots` slots; None:
        its present number; never fewer than the least. -> whether they could move now. Collective."""
        window = self._runtime.parts.window
        if slots is None:
            slots = 0 if window is None else len(window.slots)
        on_gpu = orders | self._runtime.parts.plan.placement.on_gpu
        return move(self._runtime, on_gpu, slots=max(slots, self._least)) is not None
