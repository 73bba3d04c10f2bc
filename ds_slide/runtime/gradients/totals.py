"""Sums over the ranks at the end of a step, and with them a check that all ranks have called the same collectives.

A rank that runs other blocks than the others, or keeps a graph that they do not have, averages its gradients in another
order. Where blocks have one size, this does not hang: it mixes the gradients of different blocks. So each sum also
carries a digest of the collectives that a rank has called, in any of its engines. Equal digests add up to world_size
times a rank's own.

Where gradients are compressed, their sum over micro-batches and ranks exists in compressed form only. It is taken to
have lost the same part of its square sum as the single gradients, each measured before it was compressed:

    |sum G|^2  =  |sum S|^2 * (sum |G|^2 / sum |S|^2)        exact for one gradient

The result is made, for each unit, of numbers that are added up over the ranks, so that all ranks have the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from ds_slide.errors import SlideError
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import PASSED, Device, Marker
from ds_slide.runtime.core.futures import synchronize
from ds_slide.runtime.core.ranks.collectives import Ranks

_WHAT = "the square sums of the gradients"


class SquareSums(NamedTuple):
    """The square sums of one unit, on one rank."""

    held: float
    """Square sum of the rank's part of the gradient as it waits for the step, compressed or not."""
    gradients: float
    """Square sums of single gradients before compression, added up; 0 where gradients are not compressed."""
    encoded: float
    """Square sums of single gradients after compression, added up."""


class Totals:
    """Totals of a step over all units; called by the thread that computes."""

    def __init__(self, ranks: Ranks, device: Device, compressed: Sequence[bool]) -> None:
        """`compressed`: whether the unit's gradients are compressed, by `Unit.order`."""
        self._ranks = ranks
        self._device = device
        self._is_compressed = compressed
        orders = torch.arange(len(compressed), device=device.torch)
        chosen = torch.tensor(list(compressed), dtype=torch.bool, device=device.torch)
        self._compressed, self._exact = orders[chosen], orders[~chosen]
        self._values = torch.zeros(2 + 3 * sum(compressed), dtype=torch.float64, device=device.torch)
        """A square sum and a digest, and `SquareSums` of units whose gradients are compressed: all `held`, all
        `gradients`, all `encoded`. On the collectives stream."""
        self._seen = torch.zeros(2, dtype=torch.float64, pin_memory=device.is_cuda)
        self._arrived: Marker = PASSED
        self._expected: int | None = None

    def now(self, own: Sequence[SquareSums]) -> float:
        """Return the square sum of the gradients of all units; waits for it. `own`: this rank's, by `Unit.order`.
        SlideError when the ranks have called different collectives."""
        exact = 0.0
        for sums, compressed in zip(own, self._is_compressed, strict=True):
            exact += 0.0 if compressed else sums.held  # one by one, in this order
        more = [sums for sums, compressed in zip(own, self._is_compressed, strict=True) if compressed]
        digest = self._ranks.digest
        values = torch.tensor([exact, digest, *chain.from_iterable(zip(*more, strict=True))], dtype=torch.float64)
        if self._ranks.world_size > 1:
            self._values.copy_(values)
            self._ranks.sum_(self._values, _WHAT, self._device.mark(), in_step=True)
            self._ranks.join()
            values = self._values.cpu()
            self._require_equal(digest, float(values[1]))
        return float(self._total(values))

    def later(self, own: torch.Tensor) -> torch.Tensor:
        """Return the same sum of `own` (`SquareSums`, [3, n] fp64, made on the compute and the collectives stream), []
        on the compute stream; waits for nothing. SlideError when the ranks had called different collectives at an
        earlier call."""
        if self._ranks.world_size == 1 and not len(self._compressed):
            return own[0].sum()
        self._check()
        before = self._device.mark()
        with self._ranks.on_stream():
            self._device.wait(before)  # the compute stream has read the last sum
            exact = own[0, self._exact] if len(self._compressed) else own[0]
            torch.sum(exact, 0, keepdim=True, out=self._values[:1])
            digest = self._ranks.digest
            self._values[1].fill_(digest)
            if len(self._compressed):
                self._values[2:].copy_(own[:, self._compressed].reshape(-1))
        self._ranks.sum_(self._values, _WHAT, in_step=True)
        with self._ranks.on_stream():
            if self._expected is None and self._ranks.world_size > 1:
                self._seen.copy_(self._values[:2], non_blocking=True)
                self._arrived, self._expected = self._ranks.mark(), digest
        self._ranks.join()
        return self._total(self._values)

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        if len(values) == 2:
            return values[0]
        held, gradients, encoded = values[2:].view(3, -1)
        # The ranks' gradients are averaged. Where their compressed sum is zero they are taken for independent. A NaN,
        # which finite gradients with infinite sums leave, goes into the norm.
        independent = gradients / self._ranks.world_size**2
        return values[0] + torch.where(encoded == 0, independent, held / encoded * gradients).sum()

    def _check(self) -> None:
        if self._expected is not None and self._arrived.done():
            expected, self._expected = self._expected, None
            self._require_equal(expected, float(self._seen[1]))

    def _require_equal(self, own: int, digests: float) -> None:
        if digests != float(own * self._ranks.world_size):
            raise SlideError(
                "the ranks have called different collectives in this step, so gradients of different blocks were added "
                f"up (rank {self._ranks.rank} has called {self._ranks.issued} so far), or they have requires_grad on "
                "for different parameters: all ranks have to run the same blocks in the same order, train the same "
                "parameters, and have a forward with gradients on one rank only under torch.no_grad(); resume from the "
                "last checkpoint"
            )


class NormWatch:
    """The norm of the last step, copied to the host without waiting for it, and checked after the step.

    When gradients are not held, their updates run before the norm is known. A step whose gradients were not finite
    cannot be skipped then, but it is not ignored either: it stops the run at the next step or checkpoint.
    """

    def __init__(self, context: Context) -> None:
        self._device, self._failures = context.device, context.failures
        self._host = torch.zeros(1, pin_memory=context.device.is_cuda)
        self._arrived: Marker = PASSED
        self._step = 0

    def note(self, norm: torch.Tensor, step: int) -> None:
        """Begin to copy `norm`, a 0-d device tensor, of step number `step`, which has just been taken."""
        self._host.copy_(norm.reshape(1), non_blocking=True)
        self._arrived = self._device.mark(host_waits=True)
        self._step = step

    def check(self, *, wait: bool) -> None:
        """Raise SlideError when the last step's norm is not finite; `wait`: also when it is not there yet."""
        if wait:
            synchronize(self._failures, self._arrived, "the norm of the last step")
        if self._step and self._arrived.done() and not math.isfinite(float(self._host)):
            raise SlideError(
                f"the gradients of step {self._step} were not finite and have been applied, because with clipping off "
                'updates run under backward; resume from the last checkpoint with "ds_slide": '
                '{"defer_updates": true}, which skips such steps'
            )
