"""Admits each forward and backward by the phase of the step, and cleans up after one that an exception has ended.

The engine is not told of an exception that the script catches: it checks when it is called again. After the clean-up no
slot of the window is bound, no parameter has a gradient, and no lane waits for the rest of a gradient. The accumulated
gradients are either whole or refused with an error (`ds_slide.runtime.step.accumulation`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ds_slide.errors import SlideError
from ds_slide.runtime.core.calls import NO_TASK, RootState, graph_task
from ds_slide.runtime.core.context import AS_THEY_ARE
from ds_slide.runtime.parts import Parts
from ds_slide.runtime.step.accumulation import Accumulation
from ds_slide.runtime.step.phases import Event

if TYPE_CHECKING:
    from ds_slide.runtime.engine import SlideRuntime


class Interruptions:
    """Admits forwards and backwards, and ends those that an exception has interrupted. The compute thread calls it."""

    def __init__(self, parts: Parts, accumulation: Accumulation, root: RootState, engine: SlideRuntime) -> None:
        self._parts = parts
        self._units = parts.units
        self._ranks = parts.context.ranks
        self._failures = parts.context.failures
        self._accumulation = accumulation
        self._root = root
        self._engine = engine
        self._begun = 0
        """Collectives before the forward that began last."""

    def begin_forward(self, *, with_gradient: bool) -> None:
        """Begin a forward. Raises SlideError where training cannot go on."""
        self.notice()
        self._failures.raise_first()
        self._accumulation.require(Event.TRAINING_FORWARD if with_gradient else Event.FORWARD)
        self._begun = self._ranks.begun

    def begin_backward(self) -> None:
        """Begin a backward. Raises SlideError where training cannot go on. Harmless outside of a backward, and when the
        backward has begun already."""
        task = graph_task()
        if task == NO_TASK:
            return
        if self._accumulation.is_another(task):
            self._recover()
        self._failures.raise_first()
        self._accumulation.require(Event.BACKWARD)
        self._accumulation.open(task)

    def begin_backward_of_block(self) -> None:
        """Do the work of `begin_backward` for a graph whose backward DeepSpeed has not announced, and whose end it may
        not announce."""
        task = graph_task()
        if task == NO_TASK or self._accumulation.is_open:
            return
        self._accumulation.open(task)
        # The callback runs after the whole graph, and not after an exception.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_unannounced(task))

    def nest(self) -> None:
        """Note a call of the engine or its model, maybe from inside of a backward (gradient caching calls it in a
        hook)."""
        if graph_task() != NO_TASK:
            self._accumulation.nest()

    def is_between_steps(self) -> bool:
        """Whether nothing is accumulated, no forward or backward is under way, and no graph waits for its backward."""
        self.notice()
        if self._root.active or self._accumulation.is_open or self._accumulation.micro_batches:
            return False
        return not any(unit.gradient.has_sum or unit.awaits_backward for unit in self._units)

    def backward_is_under_way(self) -> bool:
        """Whether the calling thread is in the open backward."""
        return self._accumulation.is_open and not self._accumulation.is_another(graph_task())

    def notice(self) -> None:
        """Check for an exception, from outside of any forward and backward."""
        if self._root.is_left_open():
            self._root.end()
            self._engine.release_all()
        if self._accumulation.is_open and graph_task() == NO_TASK:
            self._recover()

    def has_lost_gradients(self) -> bool:
        """Whether an exception has spoilt the gradients accumulated before it."""
        self.notice()
        return self._accumulation.is_spoiled

    def why_spoiled(self) -> str:
        """Return why the weights are a mixture of two steps, for the next user of the model; empty where they are
        whole. An open backward will not go on."""
        if self._failures.message:
            return "it has failed in the middle of its work"
        self.notice()
        if self._accumulation.is_open:
            self._recover()
        if (what := self._accumulation.mixed_by) is None:
            return ""
        return f"its {what} ended with an exception when some blocks had been updated and others had not"

    def require_weights(self, what: str) -> None:
        """Raise SlideError where weights and optimizer states are a mixture of two steps, which `what` must not see."""
        self.notice()
        try:
            self._accumulation.require(Event.READ)
        except SlideError as error:
            raise SlideError(f"{what} is refused: {error}") from None

    def require_step(self) -> None:
        """Raise SlideError where a step cannot follow, because a backward or a step has ended with an exception."""
        self.notice()
        self._failures.raise_first()
        self._accumulation.require(Event.STEP)

    def _end_unannounced(self, task: int) -> None:
        if self._accumulation.pass_over(task):
            for unit in self._units:
                unit.uses.expect_backward_again()
            self._leave_units()

    def _leave_units(self) -> None:
        for unit in self._units:
            unit.uses.in_backward = unit.gradient.finalized = False
        self._engine.release_all()

    def _recover(self) -> None:
        self._end_with_the_others()
        for unit in self._units:
            unit.uses.count_anew()
        self._leave_units()
        with AS_THEY_ARE():
            for unit in self._units:
                for parameter, _ in unit.trainable:
                    parameter.grad = None
        if not self._accumulation.interrupt(deferred=self._parts.deferred):
            for unit in self._units:
                unit.gradient.forget()

    def _end_with_the_others(self) -> None:
        """End all ranks, because the others are in the middle of the work that has ended here. They would take the next
        collective of this rank for its part in that work, and add up gradients of different blocks."""
        if self._ranks.world_size > 1 and self._ranks.begun != self._begun:
            self._failures.end(
                f"backward() on rank {self._ranks.rank} ended with an exception in the middle of what all ranks do "
                "together, so that no rank can go on: end all ranks and resume from the last checkpoint"
            )
