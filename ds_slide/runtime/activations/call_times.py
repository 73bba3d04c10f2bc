"""How long the forwards of blocks take, measured in the steps before a decision."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from ds_slide.plan.spare import Shape
from ds_slide.runtime.device import Device, Marker

BETWEEN_S = 1e-3
"""At most, of a host that has the GPU wait between two blocks: for Python's part of a layer of transformers."""


class CallTimes:
    """Times calls between `begin` and `take`, by marks on the compute stream. All methods are called by the thread that
    computes; only `take` waits for the GPU.

    Blocks of one kind have one time, the mean of theirs, so that of blocks that are alike none is chosen for the noise
    of its own."""

    def __init__(self, device: Device, kind: Mapping[int, Hashable]) -> None:
        """`kind`: of each block, by `Unit.order`."""
        self._device = device
        self._kind = kind
        self._is_timing = False
        self._entered: dict[int, Marker] = {}
        """When blocks have begun to compute."""
        self._calls: list[_Call] = []
        self._seconds: dict[Hashable, float] = {}
        """Of a block's forwards in a step, by kind."""
        self._plain_s: dict[tuple[Hashable, Shape | None], float] = {}
        """Of one call that keeps nothing or all, by kind and size of the batch: what mixing takes shows beside it."""
        self._mixing_s: dict[Hashable, float] = {}
        """How much longer a block's forwards in a step are where some results stay, by kind."""

    def begin(self) -> None:
        """Time calls from now on."""
        self._calls.clear()
        self._entered.clear()
        self._is_timing = True

    def enter(self, order: int) -> None:
        """A block has its weights, and begins to compute: its wait for them is no part of its recomputation."""
        if self._is_timing:
            self._entered[order] = self._device.mark(timed=True)

    def leave(self, order: int, shape: Shape | None, *, is_mixed: bool) -> None:
        """A call of the block has ended, in a batch of `shape`. `is_mixed`: it has kept some results only."""
        if (begun := self._entered.pop(order, None)) is not None:
            self._calls.append(_Call(order, shape, begun, self._device.mark(timed=True), is_mixed))

    def take(self) -> None:
        """The step has ended in which calls were timed. Waits for the GPU."""
        self._device.synchronize()
        blocks: dict[Hashable, set[int]] = {}
        alike: dict[tuple[Hashable, Shape | None], list[_Timed]] = {}
        for each in _timed(self._calls):
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
        """Of the block's forwards in a step; 0 as long as nothing has been timed."""
        return self._seconds.get(self._kind[order], 0.0)

    def mixing_seconds_of(self, order: int) -> float:
        """How many more they are where some results stay: a mode of the dispatcher takes time of the host, which a GPU
        with small blocks waits for."""
        return self._mixing_s.get(self._kind[order], 0.0)


@dataclass(frozen=True)
class _Call:
    """Of a block's forward. `shape`: of the batch. `is_mixed`: whether it has kept some results only."""

    order: int
    shape: Shape | None
    begun: Marker
    ended: Marker
    is_mixed: bool


@dataclass(frozen=True)
class _Timed:
    """A call that has taken `seconds`. `waited`: seconds of the GPU behind it, for the weights of the next block."""

    order: int
    shape: Shape | None
    is_mixed: bool
    seconds: float
    waited: float

    def longer_than(self, seconds: float) -> float:
        """What the step is longer by than with a call of `seconds`: a longer call makes the wait behind it shorter, and
        only what exceeds that is lost. The first blocks of a forward wait for their updates, and are mixed where these
        are in two passes: of 3 B in 24 GiB of an H100 each took 7 ms longer, as long as its recomputation, and none was
        mixed any more (benchmarks/results/2026-11-25_nvidia-h100_plan.md)."""
        longer = self.seconds - seconds
        return longer - min(max(0.0, longer), self.waited)


def _timed(calls: Sequence[_Call]) -> list[_Timed]:
    """Between two blocks of one forward the least time is the host's, unless it is long; what is more is a wait."""
    gaps = [
        max(0.0, before.ended.seconds_until(after.begun)) if after.order > before.order else None
        for before, after in pairwise(calls)
    ]
    least = min((gap for gap in gaps if gap is not None), default=0.0)
    least = min(least, BETWEEN_S)
    waits = [0.0 if gap is None else gap - least for gap in gaps] + [0.0] * bool(calls)
    return [
        _Timed(each.order, each.shape, each.is_mixed, each.begun.seconds_until(each.ended), wait)
        for each, wait in zip(calls, waits, strict=True)
    ]
