"""Whether deferred updates are done in two passes, decided by a step's times (`plan.step_model`, `PassTimes`)."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Literal

from ds_slide.plan.step_model import UpdateTimes, mean_backward_s

SAMPLES = 5
"""Steps whose median is the time of a choice. One or two of them may compile a kernel, or make room in memory."""
LASTING = 64
"""Steps after which times of the other choice are not believed any more."""
DIFFERENT = 0.02
"""Part of a step. A smaller difference is noise."""
UNEVEN = 1.25
"""Steps of one choice that differ by more than this differ in length, and tell nothing of the choice."""


class PassTimes:
    """The lengths of steps with one pass and with two, as far as they are known.

    The model of a step does not know that updates and copies share the host's memory. By the model a mixture in 24 GiB
    of an H200 changed its passes in each step, between 2.20 s with one pass and 2.46 s with two, and 3 B there left
    1.26 s with two for 1.40 s with one (benchmarks/results/2026-11-28_nvidia-h200_recorded-blocks_2.md)."""

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {two: deque(maxlen=SAMPLES) for two in (False, True)}
        self._since = {False: 0, True: 0}
        """Steps since the last one with this choice."""

    def note(self, seconds: float, *, two: bool) -> None:
        """Note a step of `seconds`, whose updates had `two` passes."""
        self._seconds[two].append(seconds)
        self._since[two] = 0
        self._since[not two] += 1
        if self._since[not two] >= LASTING:
            self._seconds[not two].clear()

    def forget(self) -> None:
        """Forget all times: memory is used in another way from now on."""
        for each in self._seconds.values():
            each.clear()

    def choose(self, *, now: bool, wanted: bool) -> bool:
        """Return whether coming updates have two passes. `now`: whether the latest had. `wanted`: what the model says.

        The other choice is tried where the model wants it, until its time is known. Then the shorter steps decide."""
        mine, other = self._seconds[now], self._seconds[not now]
        if len(mine) == SAMPLES and len(other) == SAMPLES:
            if self._is_uneven(mine) or self._is_uneven(other):
                return wanted
            gains = median(other) < (1 - DIFFERENT) * median(mine)
            return not now if gains else now
        is_on_trial = 0 < len(mine) < SAMPLES and len(other) > 0
        return now if is_on_trial or len(other) == SAMPLES else wanted

    @staticmethod
    def _is_uneven(seconds: deque[float]) -> bool:
        """Whether more than the longest and the shortest step differ."""
        inner = sorted(seconds)[1:-1]
        return inner[-1] > UNEVEN * inner[0]


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
        self.times = PassTimes()
        self._began: float | None = None
        """When the step before began to queue its updates."""
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
            two |= self._wanted == "auto" and self._choose(pay=updates.two_passes_pay)
        self.did_two, self.due, self.may_be_two = self.two, due, self._wanted != 1 and not whole
        self.two = two and self.may_be_two

    def _choose(self, *, pay: bool) -> bool:
        """Return whether coming updates have two passes. `pay`: whether they do by the model of a step."""
        now = time.perf_counter()
        if self._began is not None:
            self.times.note(now - self._began, two=self.two)
        self._began = now
        return self.times.choose(now=self.two, wanted=pay)

    def drop(self, backwards: int) -> None:
        """Note that the gradients of `backwards` backwards are dropped (overflow, `zero_grad`). Their time counts."""
        self._dropped += backwards

    def end_step(self) -> None:
        """Begin to time the next forward: the step has queued its updates."""
        self._step_ended, self._backward_began, self._dropped = time.perf_counter(), None, 0
