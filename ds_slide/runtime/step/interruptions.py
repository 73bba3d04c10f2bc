"""Finds out that a forward or backward has ended with an exception, and takes back what it has left behind.

Nobody tells the engine of an exception that the client catches: it looks when it is called again. After it no slot of
the window is bound, no gradient lies in a parameter, no lane waits for more of a gradient, and what has been
accumulated is either whole or refused by name (`ds_slide.runtime.step.accumulation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ds_slide.errors import SlideError
from ds_slide.runtime.core.calls import NO_TASK, RootState, graph_task
from ds_slide.runtime.core.clients import AS_THEY_ARE
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.step.accumulation import Accumulation
from ds_slide.runtime.step.phases import Event


class HoldsSlots(Protocol):
    """The engine (`ds_slide.runtime.engine.SlideRuntime`)."""

    def release_all(self) -> None:
        """Unbind all blocks: nothing computes any more."""


class Interruptions:
    """What ends backwards that an exception has interrupted; called by the thread that computes."""

    def __init__(
        self,
        accumulation: Accumulation,
        units: Sequence[Unit],
        root: RootState,
        ranks: Ranks,
        failures: Failures,
        engine: HoldsSlots,
        *,
        deferred: bool,
    ) -> None:
        self._accumulation = accumulation
        self._units = units
        self._root = root
        self._ranks = ranks
        self._failures = failures
        self._engine = engine
        self.deferred = deferred
        """Gradients wait for the step."""
        self._begun = 0
        """Collectives before the forward that began last."""

    def begin_forward(self, *, with_gradient: bool) -> None:
        """SlideError where training cannot go on."""
        self.notice()
        self._failures.raise_first()
        self._accumulation.require(Event.TRAINING_FORWARD if with_gradient else Event.FORWARD)
        self._begun = self._ranks.begun

    def begin_backward(self) -> None:
        """SlideError likewise. Harmless outside of a backward, and for one that has begun already."""
        task = graph_task()
        if task == NO_TASK:
            return
        if self._accumulation.is_another(task):
            self._recover()
        self._failures.raise_first()
        self._accumulation.require(Event.BACKWARD)
        self._accumulation.open(task)

    def begin_backward_of_block(self) -> None:
        """Do what `begin_backward` does for a graph whose backward DeepSpeed has not announced, and which may end
        unannounced."""
        task = graph_task()
        if task == NO_TASK or self._accumulation.is_open:
            return
        self._accumulation.open(task)
        # Called when the whole graph has run, and not after an exception.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_unannounced(task))

    def nest(self) -> None:
        """The engine or its model is called, maybe from inside of a backward (gradient caching calls it in a hook)."""
        if graph_task() != NO_TASK:
            self._accumulation.nest()

    def is_between_steps(self) -> bool:
        """Whether nothing is accumulated, and no forward or backward is under way, or waited for by a graph."""
        self.notice()
        if self._root.active or self._accumulation.is_open or self._accumulation.micro_batches:
            return False
        return not any(unit.gradient_ready or unit.awaits_backward for unit in self._units)

    def backward_is_under_way(self) -> bool:
        """Whether the calling thread is in the backward that has begun last."""
        return self._accumulation.is_open and not self._accumulation.is_another(graph_task())

    def notice(self) -> None:
        """Look, from outside of any forward and backward."""
        if self._root.is_left_open():
            self._root.end()
            self._engine.release_all()
        if self._accumulation.is_open and graph_task() == NO_TASK:
            self._recover()

    def has_lost_gradients(self) -> bool:
        """Whether an exception has spoilt what was accumulated before it."""
        self.notice()
        return self._accumulation.is_spoiled

    def why_spoiled(self) -> str:
        """Why the weights are a mixture of two steps, for whoever takes the model over; empty where they are whole. A
        backward that is open now will not go on."""
        if self._failures.message:
            return "it has failed in the middle of its work"
        self.notice()
        if self._accumulation.is_open:
            self._recover()
        if (what := self._accumulation.mixed_by) is None:
            return ""
        return f"its {what} ended with an exception when some blocks had been updated and others had not"

    def require_weights(self, what: str) -> None:
        """SlideError where weights and optimizer states are a mixture of two steps, which `what` must not see."""
        self.notice()
        try:
            self._accumulation.require(Event.READ)
        except SlideError as error:
            raise SlideError(f"{what} is refused: {error}") from None

    def require_gradients(self) -> None:
        """SlideError where the last backward has ended with an exception: a step has nothing to apply."""
        self.notice()
        self._failures.raise_first()
        self._accumulation.require(Event.STEP)

    def _end_unannounced(self, task: int) -> None:
        if self._accumulation.pass_over(task):
            for unit in self._units:
                unit.expect_backward_again()
            self._leave_units()

    def _leave_units(self) -> None:
        for unit in self._units:
            unit.in_backward = unit.finalized = False
        self._engine.release_all()

    def _recover(self) -> None:
        self._end_with_the_others()
        for unit in self._units:
            unit.count_uses_anew()
        self._leave_units()
        with AS_THEY_ARE():
            for unit in self._units:
                for parameter, _ in unit.trainable:
                    parameter.grad = None
        if not self._accumulation.interrupt(deferred=self.deferred):
            for unit in self._units:
                unit.gradient_ready = False

    def _end_with_the_others(self) -> None:
        """Other ranks are in the middle of what has ended here: the next collective of this one would be taken for its
        part in that, and gradients of different blocks be added up."""
        if self._ranks.world_size > 1 and self._ranks.begun != self._begun:
            self._failures.end(
                f"backward() on rank {self._ranks.rank} ended with an exception in the middle of what all ranks do "
                "together, so that no rank can go on: end all ranks and resume from the last checkpoint"
            )
