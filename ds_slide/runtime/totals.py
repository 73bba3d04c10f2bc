"""Sums over the ranks at the end of a step, and with them a check that all ranks have called the same collectives.

A rank that runs other blocks than the others, or keeps a graph that they do not have, averages its gradients in another
order: where blocks are of one size that does not hang, it mixes the gradients of different blocks. So a digest of what
a rank has called, in any of its engines, travels with each sum: equal digests add up to world_size times one's own.
"""

from __future__ import annotations

import torch

from ds_slide.errors import SlideError
from ds_slide.runtime.device import PASSED, Device, Marker
from ds_slide.runtime.ranks.collectives import Ranks

_WHAT = "the square sums of the gradients"


class Totals:
    """Totals of a step over all units; called by the thread that computes."""

    def __init__(self, ranks: Ranks, device: Device) -> None:
        self._ranks = ranks
        self._device = device
        self._values = torch.zeros(2, dtype=torch.float64, device=device.torch)
        """A square sum and a digest; on the collectives stream."""
        self._seen = torch.zeros(2, dtype=torch.float64, pin_memory=device.is_cuda)
        self._arrived: Marker = PASSED
        self._expected: int | None = None

    def now(self, own: float) -> float:
        """Sum of `own` over the ranks; waits for it. SlideError when the ranks have called different collectives."""
        if self._ranks.world_size == 1:
            return own
        digest = self._ranks.digest
        self._values.copy_(torch.tensor([own, digest], dtype=torch.float64))
        self._ranks.sum_(self._values, _WHAT, self._device.mark())
        self._ranks.join()
        total, digests = self._values.tolist()
        self._require_equal(digest, digests)
        return float(total)

    def later(self, own: torch.Tensor) -> torch.Tensor:
        """Sum of all of `own` ([n] fp64, made on the collectives stream) over the ranks, [] on the compute
        stream; waits for nothing. SlideError when at an earlier call the ranks had called different collectives."""
        if self._ranks.world_size == 1:
            return own.sum()
        self._check()
        before = self._device.mark()
        with self._ranks.on_stream():
            self._device.wait(before)  # the compute stream has read the last sum
            torch.sum(own, 0, keepdim=True, out=self._values[:1])
            digest = self._ranks.digest
            self._values[1:].fill_(digest)
        self._ranks.sum_(self._values, _WHAT)
        with self._ranks.on_stream():
            if self._expected is None:
                self._seen.copy_(self._values, non_blocking=True)
                self._arrived, self._expected = self._ranks.mark(), digest
        self._ranks.join()
        return self._values[0]

    def _check(self) -> None:
        if self._expected is not None and self._arrived.done():
            expected, self._expected = self._expected, None
            self._require_equal(expected, float(self._seen[1]))

    def _require_equal(self, own: int, digests: float) -> None:
        if digests != float(own * self._ranks.world_size):
            raise SlideError(
                "the ranks have called different collectives in this step, so gradients of different blocks were added "
                f"up (rank {self._ranks.rank} has called {self._ranks.issued} so far): all ranks have to run the same "
                "blocks in the same order, and a forward with gradients on one rank only has to be under "
                "torch.no_grad(); resume from the last checkpoint"
            )
