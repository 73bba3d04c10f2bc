"""Whether deferred updates are done in two passes, decided by a step's times (`plan.step_model`)."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from ds_slide.plan.step_model import UpdateTimes, mean_backward_s


class Passes:
    """Decides before each step, on each rank alone: neither choice changes a bit. The times are the host's: of the
    first forward since the last step, which ended when a block's backward began, of the backwards, and of the update
    lane meanwhile."""

    def __init__(self, wanted: Literal["auto", 1, 2]) -> None:
        self._wanted = wanted
        self.due = 1.0
        """The part of the updates whose second pass the next backward waits for, if they have one."""
        self.two = wanted == 2
        """Whether the updates that the coming step queues have two passes."""
        self.may_be_two = wanted != 1
        """Whether these updates may have two passes."""
        self.did_two = self.two
        """Whether the updates since the step before had two passes."""
        self.exceed_forward = False
        """Whether the updates of a step take longer than its forward."""
        self._lock = threading.Lock()
        self._update_s = 0.0  # written by the update lane, taken by the compute thread
        self._step_ended: float | None = None
        self._backward_began: float | None = None
        self._dropped = 0
        """Backwards since the step before whose gradients no step has applied."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of an update, which runs inside this context on the update lane."""
        began = time.perf_counter()
        yield
        with self._lock:
            self._update_s += time.perf_counter() - began

    def begin_backward(self) -> None:
        """Note that a block's backward begins. The first one after a step ends the forward that counts."""
        if self._backward_began is None:
            self._backward_began = time.perf_counter()

    def begin_step(
        self,
        *,
        backwards: int = 1,
        reach: float = 1.0,
        due: float = 1.0,
        idle_s: float = math.inf,
        whole: bool = False,
    ) -> None:
        """Choose the passes before the step queues its updates. `backwards`: the number that the step applies.
        `reach`: the part of a backward until the last unit whose second pass the next backward waits for, and `due`:
        the part of the updates that are of such units. `idle_s`: seconds of the latest step in which the update lane
        had nothing to do. `whole`: updates cannot have two passes this time."""
        with self._lock:
            taken, self._update_s = self._update_s, 0.0
        two = self._wanted == 2
        if self._step_ended is not None and self._backward_began is not None:
            several = max(1, self._dropped + backwards)
            backward = mean_backward_s(time.perf_counter() - self._backward_began, several)
            forward = self._backward_began - self._step_ended
            updates = UpdateTimes.measured(taken, forward, reach * backward, in_two=self.two)
            updates = updates.beside(due, idle_s, in_two=self.did_two)
            self.exceed_forward = updates.exceed_forward
            two |= self._wanted == "auto" and updates.two_passes_pay
        self.did_two, self.due, self.may_be_two = self.two, due, self._wanted != 1 and not whole
        self.two = two and self.may_be_two

    def drop(self, backwards: int) -> None:
        """Note that the gradients of `backwards` backwards are dropped (overflow, `zero_grad`). Their time counts."""
        self._dropped += backwards

    def end_step(self) -> None:
        """Begin to time the next forward: the step has queued its updates."""
        self._step_ended, self._backward_began, self._dropped = time.perf_counter(), None, 0
