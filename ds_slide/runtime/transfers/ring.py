"""A bounded ring of page-locked host buffers through which gradients pass on their way to the update."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from ds_slide.runtime.transfers.handoff import Failures


class HostRing:
    """`lease` blocks while every buffer is out: that is what keeps backward from running away from the updates
    (the d2h lane waits here, then the GPU staging buffers fill, then the compute thread waits for one).

    `spare` makes one buffer for a ring that has none: held gradients of a single micro-batch pass through no ring,
    until somebody runs a second backward before the step, which nobody can rule out.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], failures: Failures, spare: Callable[[], torch.Tensor] | None = None
    ) -> None:
        self._free = list(buffers)
        self._spare = None if buffers else spare
        self._changed = threading.Condition()
        self._failures = failures

    def lease(self) -> torch.Tensor:
        """A whole buffer, owned by the caller until it is given back."""
        with self._changed:
            if self._spare is not None:
                make, self._spare = self._spare, None
                return make()
            self._failures.wait_for(self._changed, lambda: bool(self._free), "a host buffer for a gradient")
            return self._free.pop()

    def give_back(self, buffer: torch.Tensor) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()
