"""The gradients of the coming step, micro-batch by micro-batch, and what an exception has made of them.

An exception in the middle of backward comes when gradients have left some units and not others. Where nothing has left
any unit yet, or nothing was accumulated before, the micro-batch never happened, and training goes on. Where they were
added to those of earlier micro-batches, or applied, nothing takes them out again: the first is over with `zero_grad()`,
the second with a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_slide.runtime.step.phases import Event, Phase, require


@dataclass
class Backward:
    """The backward that is under way, or will be the next one. Each has an object of its own."""

    is_open: bool = False
    """It is under way, or has ended with an exception that nobody has noticed yet."""
    task: int = 0
    """Its autograd graph, or the one that has begun it."""
    is_nested: bool = False
    """The model has been called from inside of it. What blocks get there adds up to what they have, so without held
    gradients no update can begin before the backward ends."""
    has_gradients: bool = False
    """It has given a parameter a gradient, as far as the units it has finished tell."""
    has_taken: bool = False
    """Gradients of it have left the parameters, or updates have begun under it."""


class Accumulation:
    """The state of the accumulation; called by the thread that computes."""

    def __init__(self) -> None:
        self.steps = 0
        """Optimizer steps so far, those of a checkpoint included."""
        self.micro_batches = 0
        """Backwards that have ended since the last step."""
        self.phase = Phase.EMPTY
        self.backward = Backward()
        self.ended_at_boundary = False
        """The last backward that has ended was the last one before a step."""
        self.mixed_by: str | None = None
        """The call that has left weights of two steps, None where there are none."""

    def require(self, event: Event) -> None:
        """SlideError where the phase refuses `event`."""
        require(self.phase, event, what=self.mixed_by or "")

    # ---- a backward --------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a backward is under way (`Backward.is_open`)."""
        return self.backward.is_open

    def open(self, task: int) -> None:
        """A backward is under way, in the autograd graph `task` or one that this has begun."""
        if not self.backward.is_open:
            self.backward.is_open, self.backward.task = True, task

    def nest(self) -> None:
        """The engine has been called from inside of the open backward: a backward of what it returns has another task
        and is a part of that."""
        self.backward.is_nested = True

    def is_another(self, task: int) -> bool:
        """Whether one is open that `task` does not belong to, so that it has ended with an exception."""
        return self.backward.is_open and self.backward.task != task and not self.backward.is_nested

    def pass_over(self, task: int) -> bool:
        """`task` has ended by itself and without DeepSpeed's epilogue, as `torch.autograd.grad` does. -> whether it was
        the open backward and took nothing, so that it is over."""
        backward = self.backward
        if not backward.is_open or backward.task != task or backward.is_nested or backward.has_gradients:
            return False
        backward.is_open = False
        return True

    def leave_out(self) -> None:
        """The backward has ended and given no parameter a gradient: it is no micro-batch."""
        self.backward = Backward()

    def close(self, *, at_boundary: bool, updates: bool) -> None:
        """The backward has ended, and all of its gradients are on their way. `at_boundary`: a step follows. `updates`:
        weights are updated from them before it."""
        self.micro_batches += 1
        self.ended_at_boundary = at_boundary
        self.backward = Backward()
        if self.phase not in (Phase.LOST_SUM, Phase.MIXED):
            self.phase = Phase.UPDATED if updates else Phase.HELD

    @property
    def is_over(self) -> bool:
        """No backward is under way, because the last one has ended with an exception."""
        return self.phase in (Phase.LOST_BACKWARD, Phase.LOST_SUM, Phase.MIXED) and not self.backward.is_open

    # ---- exceptions --------------------------------------------------------------------------------------------------

    def interrupt(self, *, deferred: bool) -> bool:
        """The open backward has ended with an exception. `deferred`: gradients wait for the step. -> whether what was
        accumulated before still counts."""
        taken, self.backward = self.backward.has_taken, Backward()
        if not taken:
            # Without held gradients a backward before this one is all of the step, which goes on.
            if deferred or not self.micro_batches:
                self._lose(Phase.LOST_BACKWARD)
        elif not deferred:
            self._mix("backward()")
        else:
            self._lose(Phase.LOST_SUM if self.micro_batches else Phase.LOST_BACKWARD)
        return not taken

    def interrupt_step(self) -> None:
        """A step has ended with an exception when updates may have begun."""
        self._mix("engine.step()")

    def _mix(self, what: str) -> None:
        self.phase, self.mixed_by = Phase.MIXED, what

    def _lose(self, phase: Phase) -> None:
        if self.phase is not Phase.MIXED:
            self.phase = phase

    @property
    def is_spoiled(self) -> bool:
        """What was accumulated before cannot be applied."""
        return self.phase in (Phase.LOST_SUM, Phase.MIXED)

    # ---- what makes it good ------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """The gradients have been applied or dropped. A mixture of weights remains one."""
        self.micro_batches = 0
        if self.phase is not Phase.MIXED:
            self.phase = Phase.EMPTY

    def reload(self) -> None:
        """Weights and optimizer states have come from a checkpoint."""
        self.micro_batches, self.phase, self.backward, self.mixed_by = 0, Phase.EMPTY, Backward(), None
