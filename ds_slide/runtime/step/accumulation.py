"""The gradients of the coming step, micro-batch by micro-batch, and what an exception has made of them.

An exception in the middle of backward comes when gradients have left some units and not others. Where nothing has left
any unit yet, or nothing was accumulated before, the micro-batch never happened, and training goes on. Where they were
added to those of earlier micro-batches, or applied, nothing takes them out again: the first is over with `zero_grad()`,
the second with a checkpoint.
"""

from __future__ import annotations

from typing import Literal

from ds_slide.errors import SlideError

Spoiled = Literal["step", "gradients", "weights"]
"""The coming step, until another backward has ended; all gradients accumulated so far; weights and optimizer states."""

NO_BACKWARD = (
    "engine.step() after a backward() that ended with an exception, and of which nothing was kept; run forward and "
    "backward() once more, of this micro-batch or another one, before engine.step()"
)
LOST_SUM = (
    "backward() ended with an exception when parts of its gradients had been added to those of earlier micro-batches "
    "of this step, from which nothing takes them out again; call engine.zero_grad() and begin the step anew, with its "
    "first micro-batch"
)
MIXED_WEIGHTS = (
    "{what} ended with an exception when some blocks had been updated and others had not, so that weights and "
    "optimizer states are a mixture of two steps; load the last checkpoint with engine.load_checkpoint(), or end this "
    "run and resume from there"
)


class Accumulation:
    """The state of the accumulation; called by the thread that computes."""

    def __init__(self) -> None:
        self.steps = 0
        """Optimizer steps so far, those of a checkpoint included."""
        self.micro_batches = 0
        """Backwards that have ended since the last step."""
        self.is_open = False
        """A backward is under way, or has ended with an exception that nobody has noticed yet."""
        self.has_gradients = False
        """That backward has given a parameter a gradient, as far as the units it has finished tell."""
        self.has_taken = False
        """Gradients of that backward have left the parameters, or updates have begun under it."""
        self.ended_at_boundary = False
        """The last backward that has ended was the last one before a step."""
        self._task = 0
        self._is_nested = False
        self._spoiled: Spoiled | None = None
        self._why = ""
        self.mixed_by: str | None = None
        """The call that has left weights of two steps, None where there are none."""

    # ---- a backward --------------------------------------------------------------------------------------------------

    def open(self, task: int) -> None:
        """A backward is under way, in the autograd graph `task` or one that this has begun."""
        if not self.is_open:
            self.is_open, self._task = True, task

    def nest(self) -> None:
        """The engine has been called from inside of the open backward: a backward of what it returns has another task
        and is a part of that."""
        self._is_nested = True

    @property
    def is_nested(self) -> bool:
        """Whether the model has been called from inside of the backward. What blocks get there adds up to what they
        have, so without held gradients no update can begin before the backward ends."""
        return self._is_nested

    def is_another(self, task: int) -> bool:
        """Whether one is open that `task` does not belong to, so that it has ended with an exception."""
        return self.is_open and self._task != task and not self._is_nested

    def pass_over(self, task: int) -> bool:
        """`task` has ended by itself and without DeepSpeed's epilogue, as `torch.autograd.grad` does. -> whether it was
        the open backward and took nothing, so that it is over."""
        if not self.is_open or self._task != task or self._is_nested or self.has_gradients:
            return False
        self.is_open = False
        return True

    def leave_out(self) -> None:
        """The backward has ended and given no parameter a gradient: it is no micro-batch."""
        self.is_open = self.has_gradients = self.has_taken = self._is_nested = False

    def close(self, *, at_boundary: bool) -> None:
        """The backward has ended, and all of its gradients are on their way. `at_boundary`: a step follows."""
        self.micro_batches += 1
        self.ended_at_boundary = at_boundary
        self.is_open = self.has_gradients = self.has_taken = self._is_nested = False
        if self._spoiled == "step":
            self._spoiled = None

    @property
    def is_over(self) -> bool:
        """No backward is under way, because the last one has ended with an exception."""
        return self._spoiled is not None and not self.is_open

    # ---- exceptions --------------------------------------------------------------------------------------------------

    def interrupt(self, *, deferred: bool) -> bool:
        """The open backward has ended with an exception. `deferred`: gradients wait for the step. -> whether what was
        accumulated before still counts."""
        taken = self.has_taken
        self.is_open = self.has_gradients = self.has_taken = self._is_nested = False
        if not taken:
            # Without held gradients a backward before this one is all of the step, which goes on.
            if deferred or not self.micro_batches:
                self._spoil("step", NO_BACKWARD)
        elif not deferred:
            self._mix("backward()")
        elif self.micro_batches:
            self._spoil("gradients", LOST_SUM)
        else:
            self._spoil("step", NO_BACKWARD)
        return not taken

    def interrupt_step(self) -> None:
        """A step has ended with an exception when updates may have begun."""
        self._mix("engine.step()")

    def _mix(self, what: str) -> None:
        self._spoil("weights", MIXED_WEIGHTS.format(what=what))
        self.mixed_by = what

    def _spoil(self, what: Spoiled, why: str) -> None:
        if self._spoiled != "weights":
            self._spoiled, self._why = what, why

    @property
    def is_spoiled(self) -> bool:
        """What was accumulated before cannot be applied."""
        return self._spoiled in ("gradients", "weights")

    # ---- questions ---------------------------------------------------------------------------------------------------

    def require_weights(self) -> None:
        """SlideError where the weights are a mixture."""
        self._refuse("weights")

    def require_gradients(self) -> None:
        """SlideError where nothing can be added to what has been accumulated."""
        self._refuse("weights", "gradients")

    def require_whole(self) -> None:
        """SlideError where a step has nothing that it could apply."""
        self._refuse("weights", "gradients", "step")

    def _refuse(self, *spoiled: Spoiled) -> None:
        if self._spoiled in spoiled:
            raise SlideError(self._why)

    # ---- what makes it good ------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """The gradients have been applied or dropped. A mixture of weights remains one."""
        self.micro_batches = 0
        if self._spoiled != "weights":
            self._spoiled = None

    def reload(self) -> None:
        """Weights and optimizer states have come from a checkpoint."""
        self.clear()
        self.is_open = self.has_gradients = self.has_taken = self._is_nested = False
        self._spoiled = self.mixed_by = None
