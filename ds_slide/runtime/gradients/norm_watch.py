"""Checks gradient norms after the step, which does not wait for them.

When gradients are not held, their updates run before the norm is known. A step whose gradients were not finite cannot
be skipped then, but it is not ignored either: it stops the run at the next step or checkpoint.
"""

from __future__ import annotations

import math

import torch

from ds_slide.errors import SlideError
from ds_slide.runtime.core.device import PASSED, Marker
from ds_slide.runtime.core.futures import synchronize
from ds_slide.runtime.engine import SlideRuntime


class NormWatch:
    """The norm of the last step, copied to the host without waiting for it."""

    def __init__(self, runtime: SlideRuntime) -> None:
        self._runtime = runtime
        self._host = torch.zeros(1, pin_memory=runtime.device.is_cuda)
        self._arrived: Marker = PASSED
        self._step = 0

    def note(self, norm: torch.Tensor) -> None:
        """Begin to copy `norm`, a 0-d device tensor, of the step that has just been taken."""
        self._host.copy_(norm.reshape(1), non_blocking=True)
        self._arrived = self._runtime.device.mark(host_waits=True)
        self._step = self._runtime.step_count

    def check(self, *, wait: bool) -> None:
        """Raise SlideError when the last step's norm is not finite; `wait`: also when it is not there yet."""
        if wait:
            synchronize(self._runtime.parts.context.failures, self._arrived, "the norm of the last step")
        if self._step and self._arrived.done() and not math.isfinite(float(self._host)):
            raise SlideError(
                f"the gradients of step {self._step} were not finite and have been applied, because with clipping off "
                'updates run under backward; resume from the last checkpoint with "ds_slide": '
                '{"defer_updates": true}, which skips such steps'
            )
