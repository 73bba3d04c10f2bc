"""The engine's decisions after its first steps: its own functions make them, from predicted figures.

The sums that replace a measurement are the same as in `ds_slide.runtime.memory.spare_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ds_slide.plan.forecast import WORKSPACE_BYTES, Room
from ds_slide.plan.keeping import Keepable, Kept, kept_within
from ds_slide.plan.memory import Plan
from ds_slide.plan.movable import movable_states, summable_units, window_slots
from ds_slide.plan.sharing import MEMORY_RATE, Offer, for_states, share_out
from ds_slide.plan.spare import GPU_SHARES, inputs_missing, spare_bytes
from ds_slide.plan.step_model import Step
from ds_slide.runtime.memory.spare_memory import LOOKS


class Forecaster(Protocol):
    """Knows one training step."""

    def step(self, plan: Plan, kept: Kept, /, *, two: bool = True) -> Step:
        """Return the step with this plan and these activations kept. `two`: its updates may be done in two passes."""


@dataclass(frozen=True)
class Spare:
    """The GPU's memory beside a plan. `needed`: bytes of a batch with nothing kept. `limit`: `ds_slide.gpu_memory`.
    `tied`: states cannot always go back when a batch begins. `memory_rate`: bytes a second of the GPU's memory."""

    room: Room
    needed: int
    limit: int | None
    tied: bool
    memory_rate: float = MEMORY_RATE

    @property
    def exists(self) -> bool:
        return self.room.gpu is not None or self.limit is not None

    def bytes_beside(self, plan: Plan) -> float:
        """Return the bytes that a batch leaves, of the GPU and of the limit."""
        rooms: list[float] = []
        if self.room.gpu is not None and self.room.gpu_for_plan is not None:
            rooms.append(spare_bytes(self._free(plan), self.needed, GPU_SHARES.margin * self.room.gpu))
        if self.limit is not None:
            rooms.append(self.limit - plan.gpu_bytes)
        return min(rooms)

    def inputs_missing(self, plan: Plan) -> float:
        """Return the bytes of inputs that have to leave the GPU for the batch."""
        return inputs_missing(self._free(plan), self.needed, GPU_SHARES.margin * (self.room.gpu or 0))

    def _free(self, plan: Plan) -> int:
        return (self.room.gpu_for_plan or 0) - WORKSPACE_BYTES - plan.gpu_bytes


@dataclass(frozen=True)
class Question:
    """The input of a decision. `keepable`: blocks, by the index of the unit. `forwards`: forwards of a step."""

    plan: Plan
    spare: Spare
    keepable: Sequence[Keepable]
    forecaster: Forecaster
    moves_states: bool
    forwards: int


@dataclass(frozen=True)
class Decision:
    """`plan`: the plan with promoted units. `kept`: activations. `before`: plan and activations of the steps in
    between."""

    plan: Plan
    kept: Kept
    before: Sequence[tuple[Plan, Kept]] = ()


def decide(question: Question) -> Decision:
    """Return the engine's decision after all its decision steps."""
    plan, kept, spare = question.plan, Kept(), question.spare
    if not spare.exists:
        return Decision(plan, kept)
    decided: list[tuple[Plan, Kept]] = []
    for look in LOOKS:
        coming = question.forecaster.step(plan, kept)
        # The step before the first measured step queues its updates. That step's own updates are the first of all: the
        # host then makes every page of the states, for seconds, which no second pass would hide.
        step = question.forecaster.step(plan, kept, two=False) if look == LOOKS[0] else coming
        room, reserve = for_states(spare.bytes_beside(plan), spare.needed, tied=spare.tied)
        slots = window_slots(plan, question.forwards)
        movable = movable_states(plan, question.forwards) if question.moves_states else ()
        whole = step.recomputing(kept.seconds(question.keepable))
        sums = summable_units(plan, question.forwards) if question.moves_states else ()
        offer = Offer(room, movable, question.keepable, whole, slots, spare.memory_rate, reserve, sums)
        choice = share_out(offer if question.moves_states else offer.without_moves())
        if choice.moves(offer):
            promoted, summed = plan.placement.promoted | choice.states, plan.placement.summed | choice.sums
            plan = plan.with_promoted(promoted, max(choice.slots, slots.least), summed)
        kept = kept_within(spare.bytes_beside(plan), question.keepable, first=coming.schedule == "two passes")
        decided.append((plan, kept))
    return Decision(plan, kept, decided[:-1])
