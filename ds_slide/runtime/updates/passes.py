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

from ds_slide.plan.two_passes import PASS_SHARE, exceeds, second_fits


class Passes:
    """Decides before each step, on every rank for itself: neither choice changes a bit. The times are the host's: of
    the last forward, which ended when backward began, of that backward, and of the update lane meanwhile."""

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
        """The first one after a step ends the forward that counts."""
        if self._backward_began is None:
            self._backward_began = time.perf_counter()

    def begin_step(self, *, speculated: bool = False) -> None:
        """Before the step queues its updates. `speculated`: some of them, whole, have been done under backward."""
        with self._lock:
            taken, self._update_s = self._update_s, 0.0
        two = self._wanted == 2
        if self._step_ended is not None and self._backward_began is not None:
            whole = taken / (2 * PASS_SHARE) if self.two else taken
            forward, backward = self._backward_began - self._step_ended, time.perf_counter() - self._backward_began
            self.exceed_forward = exceeds(whole, forward)
            two |= self._wanted == "auto" and self.exceed_forward and second_fits(whole, backward)
        self.did_two, self.two = self.two, two and not speculated

    def end_step(self) -> None:
        """After the step has queued its updates."""
        self._step_ended, self._backward_began = time.perf_counter(), None
