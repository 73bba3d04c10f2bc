"""Seconds of the forwards of blocks, measured in the steps before a decision."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import fmean

from ds_slide.plan.spare import Shape
from ds_slide.runtime.core.device import Device, Marker

WAIT_S = 2e-3
"""A GPU that idles longer than this between two blocks waits for weights; Python's part between two layers of
transformers is shorter."""


class CallTimes:
    """Times calls between `begin` and `take`, by marks on the compute stream. All methods are called by the thread that
    computes; only `take` waits for the GPU.

    All blocks of a kind have one time, their mean, so that noise does not choose between equal blocks."""

    def __init__(self, device: Device, kind: Mapping[int, Hashable]) -> None:
        """`kind`: the kind of each block, by `Unit.order`."""
        self._device = device
        self._kind = kind
        self._is_timing = False
        self._entered: dict[int, Marker] = {}
        """Marks at which blocks have begun to compute."""
        self._calls: list[_Call] = []
        self._latest: _Call | None = None
        """The last call, until the next block begins."""
        self._seconds: dict[Hashable, float] = {}
        """Seconds of a block's forwards in a step, by kind."""
        self._plain_s: dict[tuple[Hashable, Shape | None], float] = {}
        """Seconds of one call that keeps nothing or all, by kind and shape of the batch. The difference from a mixed
        call is the cost of mixing."""
        self._mixing_s: dict[Hashable, float] = {}
        """Additional seconds of a block's forwards in a step where some results stay, by kind."""

    def begin(self) -> None:
        """Time calls from now on."""
        self._calls.clear()
        self._entered.clear()
        self._latest = None
        self._is_timing = True

    def enter(self, order: int) -> None:
        """Note that a block begins to compute with its weights: a recomputation has no wait for them."""
        if not self._is_timing:
            return
        self._entered[order] = self._device.mark(timed=True)
        if self._latest is not None:
            self._latest.following, self._latest = self._entered[order], None

    def leave(self, order: int, shape: Shape | None, *, is_mixed: bool) -> None:
        """Note that a call of the block has ended, in a batch of `shape`. `is_mixed`: it has kept some results only."""
        if (begun := self._entered.pop(order, None)) is not None:
            self._latest = _Call(order, shape, begun, self._device.mark(timed=True), is_mixed)
            self._calls.append(self._latest)

    def end_forward(self) -> None:
        """End the forward: the next block that begins to compute is not part of it."""
        self._latest = None

    def take(self) -> None:
        """End the timing after a step, and compute the times of blocks. Waits for the GPU."""
        self._device.synchronize()
        blocks: dict[Hashable, set[int]] = {}
        alike: dict[tuple[Hashable, Shape | None], list[_Call]] = {}
        for each in self._calls:
            kind = self._kind[each.order]
            blocks.setdefault(kind, set()).add(each.order)
            alike.setdefault((kind, each.shape), []).append(each)
        self._seconds = dict.fromkeys(blocks, 0.0)
        more: dict[Hashable, float] = {}
        for (kind, shape), calls in alike.items():
            plain = [each.seconds for each in calls if not each.is_mixed]
            mixed = [each for each in calls if each.is_mixed]
            if plain:
                self._plain_s[kind, shape] = fmean(plain)
            known = self._plain_s.get((kind, shape))
            seconds = fmean(each.seconds for each in mixed) if known is None else known
            calls_of_block = len(calls) / len(blocks[kind])
            self._seconds[kind] += calls_of_block * seconds
            if mixed and known is not None:
                more[kind] = more.get(kind, 0.0) + calls_of_block * fmean(each.longer_than(known) for each in mixed)
        self._mixing_s |= {kind: max(0.0, seconds) for kind, seconds in more.items()}
        self._calls.clear()
        self._is_timing = False

    def seconds_of(self, order: int) -> float:
        """Return the seconds of the block's forwards in a step; 0 as long as nothing has been timed."""
        return self._seconds.get(self._kind[order], 0.0)

    def mixing_seconds_of(self, order: int) -> float:
        """Return the additional seconds where some results stay: a mode of the dispatcher takes host time, and a GPU
        with small blocks waits for the host."""
        return self._mixing_s.get(self._kind[order], 0.0)


@dataclass
class _Call:
    """One timed call of a block's forward. `shape`: of the batch. `is_mixed`: it has kept some results only.
    `following`: the mark at which the next block of the same forward has begun to compute, if one has."""

    order: int
    shape: Shape | None
    begun: Marker
    ended: Marker
    is_mixed: bool
    following: Marker | None = None

    @property
    def seconds(self) -> float:
        return self.begun.seconds_until(self.ended)

    def longer_than(self, seconds: float) -> float:
        """Return the seconds that this call adds to a step beside a call of `seconds`. 0 where the GPU then waits for
        the weights of the next block, since a shorter call would not bring them sooner. The first blocks of a forward
        wait for their updates, and are mixed where these are in two passes. With 3 B in 24 GiB of an H100 each such
        block took 7 ms longer, the time of its recomputation, and none was mixed any more
        (benchmarks/results/2026-11-25_nvidia-h100_plan.md)."""
        if self.following is not None and self.ended.seconds_until(self.following) > WAIT_S:
            return 0.0
        return self.seconds - seconds
