"""The gradients of the coming step, micro-batch by micro-batch, and their state after an exception.

An exception in the middle of backward may leave some units with their gradients taken and others not. If no gradient
was taken yet, or nothing was accumulated before, the micro-batch is dropped and training goes on. Gradients that were
added to earlier micro-batches, or applied, cannot be removed again. After the first `zero_grad()` is needed, after the
second a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_slide.runtime.step.phases import Event, Phase, require


@dataclass
class Backward:
    """The open backward, or the next one. Each has an object of its own."""

    is_open: bool = False
    """Whether it is under way, or has ended with an exception that the engine has not noticed yet."""
    task: int = 0
    """Its autograd graph task, or the task that has begun it."""
    is_nested: bool = False
    """Whether the model has been called from inside of it. Gradients from there are added to the blocks' gradients, so
    without held gradients no update can begin before the backward ends."""
    has_gradients: bool = False
    """Whether it has given a parameter a gradient, judging by its finished units."""
    has_taken: bool = False
    """Whether its gradients have left the parameters, or updates have begun under it."""


class Accumulation:
    """The state of the accumulation; called by the compute thread."""

    def __init__(self) -> None:
        self.steps = 0
        """Optimizer steps so far, including the steps of a loaded checkpoint."""
        self.micro_batches = 0
        """Backwards that have ended since the last step."""
        self.phase = Phase.EMPTY
        self.backward = Backward()
        self.ended_at_boundary = False
        """Whether the last ended backward was the last one before a step."""
        self.mixed_by: str | None = None
        """The call that has left a mixture of two steps' weights; None without a mixture."""

    def require(self, event: Event) -> None:
        """Raise SlideError where the phase refuses `event`."""
        require(self.phase, event, what=self.mixed_by or "")

    # ---- a backward --------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a backward is under way (`Backward.is_open`)."""
        return self.backward.is_open

    def open(self, task: int) -> None:
        """Open the backward that runs in the autograd graph task `task`, or in a task that this one has begun."""
        if not self.backward.is_open:
            self.backward.is_open, self.backward.task = True, task

    def nest(self) -> None:
        """Note a call of the engine from inside of the open backward. A backward through its output has another task,
        and is a part of the open backward."""
        self.backward.is_nested = True

    def is_another(self, task: int) -> bool:
        """Whether a backward is open that `task` does not belong to, so that it has ended with an exception."""
        return self.backward.is_open and self.backward.task != task and not self.backward.is_nested

    def pass_over(self, task: int) -> bool:
        """Handle a `task` that has ended without DeepSpeed's epilogue, as in `torch.autograd.grad`. Returns whether it
        was the open backward and took no gradient, so that it is over."""
        backward = self.backward
        if not backward.is_open or backward.task != task or backward.is_nested or backward.has_gradients:
            return False
        backward.is_open = False
        return True

    def leave_out(self) -> None:
        """Close a backward that has given no parameter a gradient: it is no micro-batch."""
        self.backward = Backward()

    def close(self, *, at_boundary: bool, updates: bool) -> None:
        """Close the backward; transfers of all its gradients are under way. `at_boundary`: a step follows. `updates`:
        the weights are updated with these gradients before the step."""
        self.micro_batches += 1
        self.ended_at_boundary = at_boundary
        self.backward = Backward()
        if self.phase not in (Phase.LOST_SUM, Phase.MIXED):
            self.phase = Phase.UPDATED if updates else Phase.HELD

    @property
    def is_over(self) -> bool:
        """Whether no backward is under way because the last one has ended with an exception."""
        return self.phase in (Phase.LOST_BACKWARD, Phase.LOST_SUM, Phase.MIXED) and not self.backward.is_open

    # ---- exceptions --------------------------------------------------------------------------------------------------

    def interrupt(self, *, deferred: bool) -> bool:
        """Close the open backward after an exception. `deferred`: gradients wait for the step. Returns whether the
        gradients accumulated before still count."""
        taken, self.backward = self.backward.has_taken, Backward()
        if not taken:
            # Without held gradients an earlier backward is the whole step, and the step goes on.
            if deferred or not self.micro_batches:
                self._lose(Phase.LOST_BACKWARD)
        elif not deferred:
            self._mix("backward()")
        else:
            self._lose(Phase.LOST_SUM if self.micro_batches else Phase.LOST_BACKWARD)
        return not taken

    def interrupt_step(self) -> None:
        """Note that a step has ended with an exception when updates may have begun."""
        self._mix("engine.step()")

    def _mix(self, what: str) -> None:
        self.phase, self.mixed_by = Phase.MIXED, what

    def _lose(self, phase: Phase) -> None:
        # A second exception mends nothing: what was lost before stays lost.
        if not self.is_spoiled:
            self.phase = phase

    @property
    def is_spoiled(self) -> bool:
        """Whether the gradients accumulated before cannot be applied."""
        return self.phase in (Phase.LOST_SUM, Phase.MIXED)

    # ---- what makes it good ------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Begin a new accumulation after the gradients have been applied or dropped. A mixture of weights remains."""
        self.micro_batches = 0
        if self.phase is not Phase.MIXED:
            self.phase = Phase.EMPTY

    def reload(self) -> None:
        """Begin anew with the weights and optimizer states of a checkpoint."""
        self.micro_batches, self.phase, self.backward, self.mixed_by = 0, Phase.EMPTY, Backward(), None
