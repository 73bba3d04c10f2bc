"""Whether deferred updates are done in two passes: the weights under the next forward, the states under its backward.

The next forward needs the new weights only. A pass over these reads gradient, states and master and writes the master,
18 bytes a parameter (AdamW in fp32) instead of 26; a second pass computes the same states from the same inputs and
writes them, 18 bytes more, before the block's next gradient arrives. A step then costs max(forward, 18/26 of the
update) + max(backward, 18/26 of the update) instead of max(forward, update) + backward.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from ds_slide.plan.two_passes import PASS_SHARE, exceeds, one_backward, second_pays


class Passes:
    """Decides before each step, on every rank for itself: neither choice changes a bit. The times are the host's: of
    the first forward since the last step, which ended when a block's backward began, of the backwards, and of the
    update lane meanwhile."""

    def __init__(self, wanted: Literal["auto", 1, 2]) -> None:
        self._wanted = wanted
        self.two = wanted == 2
        """For the updates that the coming step queues."""
        self.did_two = self.two
        """For those that were done since the step before."""
        self.exceed_forward = False
        """Whether the updates of a step take longer than its forward."""
        self._lock = threading.Lock()
        self._update_s = 0.0  # written by the update lane, taken by the compute thread
        self._step_ended: float | None = None
        self._backward_began: float | None = None

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around an update, on the update lane."""
        began = time.perf_counter()
        yield
        with self._lock:
            self._update_s += time.perf_counter() - began

    def begin_backward(self) -> None:
        """Of a block. The first one after a step ends the forward that counts."""
        if self._backward_began is None:
            self._backward_began = time.perf_counter()

    def begin_step(self, *, backwards: int = 1, reach: float = 1.0, speculated: bool = False) -> None:
        """Before the step queues its updates. `backwards`: since the step before. `reach`: the part of one until the
        last unit that the host updates. `speculated`: some of them, whole, have been done under backward."""
        with self._lock:
            taken, self._update_s = self._update_s, 0.0
        two = self._wanted == 2
        if self._step_ended is not None and self._backward_began is not None:
            whole, awaited = (taken / (2 * PASS_SHARE), taken / 2) if self.two else (taken, taken)
            forward = self._backward_began - self._step_ended
            backward = one_backward(time.perf_counter() - self._backward_began, backwards)
            self.exceed_forward = exceeds(whole, forward)
            hides = max(0.0, forward - awaited) + reach * backward
            two |= self._wanted == "auto" and self.exceed_forward and second_pays(whole, hides)
        self.did_two, self.two = self.two, two and not speculated

    def end_step(self) -> None:
        """After the step has queued its updates."""
        self._step_ended, self._backward_began = time.perf_counter(), None
