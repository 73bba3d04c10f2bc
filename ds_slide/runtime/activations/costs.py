"""What blocks cost: bytes of their saved tensors and inputs, and seconds of their forwards, measured before a decision.

All blocks of a kind have the same costs. Their time is the mean, so that noise does not choose between equal blocks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ds_slide.plan.keeping import Keepable
from ds_slide.plan.spare import Input, Shape
from ds_slide.runtime.activations.checkpointing import BlockCall
from ds_slide.runtime.activations.measuring import CountedCall, MeasuredBlock, WatchedForward
from ds_slide.runtime.core.device import Device, Marker
from ds_slide.runtime.core.unit import Unit

WAIT_S = 2e-3
"""A GPU that idles longer than this between two blocks waits for weights; Python's part between two layers of
transformers is shorter."""
HOST_BOUND = 0.8
"""Blocks whose launches take the host this part of their time on the GPU, or more, wait for the host. The shortest
times of each kind of block count: updates in host memory slow the host down by up to three times. In 24 GiB of an H100
the part was 0.69 with 3 B and 8 x 2,048 tokens, 0.99 with 7.6 B and 1 x 2,048, and 2.7 with 3 B and 1 x 2,048
(benchmarks/results/2026-11-27_nvidia-h100_recorded-blocks_3.md)."""

STEP_TO_BLOCKS = 1.3
"""What a step computes, as a multiple of what its blocks do. 3 B computed for 0.89 s where its blocks took 0.66, and
7.6 B for 1.72 s where they took 1.29 (the same page)."""


class BlockCosts:
    """The thread that computes calls all methods."""

    def __init__(self, blocks: Sequence[Unit], device: Device, *, mixes: bool) -> None:
        """`mixes`: whether a block may keep some results and recompute the rest."""
        self._blocks = blocks
        self._mixes = mixes
        self._kind = {unit.order: _kind_of(unit) for unit in blocks}
        self._kinds = frozenset(self._kind.values())
        self.times = CallTimes(device, self._kind)
        self.orders: frozenset[int] = frozenset()
        """Blocks that were taken over in the newest forward."""
        self.calls: Counter[int] = Counter()
        """Calls of each block in the newest forward."""
        self._most_calls: Counter[int] = Counter()
        """The most calls of each block in one forward so far."""
        self._measured: dict[Hashable, MeasuredBlock] = {}
        """Measurements by kind of block, at the largest shape so far."""
        self._asked: set[Hashable] = set()
        """Kinds that are to be measured by the next recomputation of one of their blocks."""
        self._saves_nothing: set[int] = set()
        """Blocks, by `Unit.order`, that no backward has come to when their kind was measured."""
        self._communicates: dict[int, bool] = {}
        """Whether the block's own forward has had a collective, by `Unit.order`. Each rank decides alone what it keeps,
        and a rank that recomputed a collective alone would wait for ever, so all ranks recompute these blocks."""
        self._inputs: dict[Hashable, tuple[int, int]] = {}
        """(tokens of the largest batch so far, bytes of a block's input in it), by kind of block."""

    def begin(self, orders: frozenset[int], shape: Shape | None) -> None:
        """Begin a forward in a batch of `shape`. `orders`: blocks that are taken over."""
        self._most_calls |= self.calls
        self.calls.clear()
        self.orders = orders
        if orders and shape is not None:
            of = {kind: self._measured.get(kind) for kind in self._kinds}
            self._asked = {kind for kind, known in of.items() if known is None or known.saved.growth(shape) > 1}

    def counted(self, call: BlockCall, shape: Shape | None) -> CountedCall | WatchedForward | None:
        """Return what replaces the block's forward so that it, or its recomputation, is measured; None where it need
        not be."""
        order = call.unit.order
        kind = self._kind[order]
        forward = WatchedForward(call, self._communicates)
        if shape is not None and kind in self._asked:
            if call.has_gradient:
                self._saves_nothing.discard(order)
                self._asked.discard(kind)
                return CountedCall(call, shape, kind, self._measured, forward)
            self._saves_nothing.add(order)  # frozen, in front of all that is trained: no backward comes to it
        return None if order in self._communicates else forward

    def note_input(self, order: int, shape: Shape, nbytes: int) -> None:
        """Note the bytes of the block's input in a batch of `shape`."""
        if shape.tokens > self._inputs.get(self._kind[order], (0, 0))[0]:
            self._inputs[self._kind[order]] = shape.tokens, nbytes

    def inputs(self, shape: Shape | None) -> list[Input]:
        """Return the inputs of blocks at `shape`, in the order of their calls, without kinds not seen yet."""
        found = []
        for order in sorted(self.orders):
            tokens, nbytes = self._inputs.get(self._kind[order], (0, 0))
            if tokens and shape is not None:
                found.append(Input(order, -(-self.expected_calls(order) * nbytes * shape.tokens // tokens)))
        return found

    def input_bytes(self, shape: Shape | None) -> int:
        """Return the bytes of all known inputs at `shape`."""
        return sum(each.nbytes for each in self.inputs(shape))

    def keepable(self, shape: Shape | None) -> list[Keepable]:
        """Return the blocks that might be kept in a batch of `shape`; none before they have been measured."""
        if shape is None:
            return []
        found = []
        for order in self.orders - self._saves_nothing:
            if self.is_alone(order):
                measured = self._measured[self._kind[order]]
                calls = self.expected_calls(order)
                mixtures = measured.mixtures if self._mixes else ()
                mixed = tuple(each.times(calls * measured.saved.growth(shape)) for each in mixtures)
                seconds = measured.again * self.times.seconds_of(order)
                mixing_s = self.times.mixing_seconds_of(order)
                found.append(Keepable(order, calls * int(measured.saved.at(shape)), seconds, mixed, mixing_s))
        return found

    def is_alone(self, order: int) -> bool:
        """Whether the block's kind has been measured, and no other rank takes part in the block."""
        return self._kind[order] in self._measured and not self._communicates.get(order, True)

    def call_bytes(self, order: int, shape: Shape) -> int:
        """Return the bytes of the saved tensors of one call of a block that has been measured."""
        return int(self._measured[self._kind[order]].saved.at(shape))

    def square_bytes(self, shape: Shape) -> float | None:
        """Return the most bytes that a block has in tensors with an element for each pair of tokens of a sequence, in a
        batch of `shape`. None where a block has not been measured: the script's checkpointing may not reach it."""
        if not self._kinds or self._measured.keys() < self._kinds:
            return None
        return max(each.squares.at(shape) for each in self._measured.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of the block that has the most of them."""
        return max((_gradient_bytes(unit) for unit in self._blocks), default=0)

    def expected_calls(self, order: int) -> int:
        """Return the expected number of calls of the block in one forward."""
        return max(1, self._most_calls[order])


def _gradient_bytes(unit: Unit) -> int:
    return sum(entry.numel * each.dtype.itemsize for each in (unit, *unit.parts) for _, entry in each.trainable)


def _kind_of(unit: Unit) -> Hashable:
    """Blocks of one class with weights of the same shapes save the same."""
    return type(unit.spec.module), tuple(entry.shape for each in (unit, *unit.parts) for entry in each.layout.entries)


class CallTimes:
    """Times calls between `begin` and `take`, by marks on the compute stream. All methods are called by the thread that
    computes; only `take` waits for the GPU."""

    def __init__(self, device: Device, kind: Mapping[int, Hashable]) -> None:
        """`kind`: the kind of each block, by `Unit.order`."""
        self._device = device
        self._kind = kind
        self.is_timing = False
        self._entered: dict[int, tuple[Marker, float, bool]] = {}
        """Marks at which blocks have begun to compute, the host's seconds then, and whether the GPU was behind."""
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
        self.on_gpu_s = 0.0
        """Seconds of all that the step computes, with blocks that are recomputed and a GPU that waits for nothing."""
        self.wait_for_host = False
        """Whether the host took as long as the GPU for the calls that were timed last."""

    def begin(self) -> None:
        """Time calls from now on."""
        self._calls.clear()
        self._entered.clear()
        self._latest = None
        self.is_timing = True

    def enter(self, order: int) -> None:
        """Note that a block begins to compute with its weights: a recomputation has no wait for them."""
        if not self.is_timing:
            return
        is_behind = self._latest is not None and not self._latest.ended.done()
        begun = self._device.mark(timed=True)
        self._entered[order] = begun, time.perf_counter(), is_behind
        if self._latest is not None:
            self._latest.following, self._latest = begun, None

    def leave(self, order: int, shape: Shape | None, *, is_mixed: bool) -> None:
        """Note that a call of the block has ended, in a batch of `shape`. `is_mixed`: it has kept some results only."""
        if (entered := self._entered.pop(order, None)) is not None:
            begun, host_began, is_behind = entered
            host_s = time.perf_counter() - host_began
            self._latest = _Call(order, shape, begun, self._device.mark(timed=True), host_s, is_behind, is_mixed)
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
        plain = [[each for each in calls if not each.is_mixed] for calls in alike.values()]
        self._seconds = dict.fromkeys(blocks, 0.0)
        more: dict[Hashable, float] = {}
        for ((kind, shape), calls), some in zip(alike.items(), plain, strict=True):
            mixed = [each for each in calls if each.is_mixed]
            if some:
                self._plain_s[kind, shape] = fmean(each.seconds for each in some)
            known = self._plain_s.get((kind, shape))
            seconds = fmean(each.seconds for each in mixed) if known is None else known
            calls_of_block = len(calls) / len(blocks[kind])
            self._seconds[kind] += calls_of_block * seconds
            if mixed and known is not None:
                more[kind] = more.get(kind, 0.0) + calls_of_block * fmean(each.longer_than(known) for each in mixed)
        self._mixing_s |= {kind: max(0.0, seconds) for kind, seconds in more.items()}
        self._compare_with_host(list(alike.values()), plain)
        self._calls.clear()
        self.is_timing = False

    def _compare_with_host(self, alike: Sequence[Sequence[_Call]], plain: Sequence[Sequence[_Call]]) -> None:
        """Compare the GPU's times with the host's. `alike`: calls of one kind and shape, for each of them. `plain`: the
        calls among them that keep nothing or all. A mode of the dispatcher slows the host down in mixed calls: 14 B
        with adapters, which keeps the GPU busy with 4 x 2,048 tokens, seemed to wait for the host
        (benchmarks/results/2026-11-27_nvidia-h100_lengths_2.md)."""
        if not any(plain):
            return
        shortest = [min(each.seconds for each in some or calls) for calls, some in zip(alike, plain, strict=True)]
        all_on_gpu = sum(len(calls) * seconds for calls, seconds in zip(alike, shortest, strict=True))
        of_gpu = sum(len(some) * seconds for some, seconds in zip(plain, shortest, strict=True))
        of_host = sum(len(some) * min(each.host_s for each in some) for some in plain if some)
        # A forward, its recomputation, and a backward of two forwards. Mixed calls take the GPU as long as plain ones.
        self.on_gpu_s = STEP_TO_BLOCKS * 4 * all_on_gpu
        behind = [each.is_behind for some in plain for each in some]
        # Behind a full queue of launches the host takes as long as the GPU.
        self.wait_for_host = of_host >= HOST_BOUND * of_gpu > 0 and 2 * sum(behind) <= len(behind)

    def seconds_of(self, order: int) -> float:
        """Return the seconds of the block's forwards in a step; 0 as long as nothing has been timed."""
        return self._seconds.get(self._kind[order], 0.0)

    def mixing_seconds_of(self, order: int) -> float:
        """Return the additional seconds where some results stay: a mode of the dispatcher takes host time, and a GPU
        with small blocks waits for the host."""
        return self._mixing_s.get(self._kind[order], 0.0)


@dataclass
class _Call:
    """One timed call of a block's forward.

    `shape`: of the batch. `host_s`: seconds in which the host has launched it. `is_behind`: the GPU had not ended the
    block before when the host began to launch this one. `is_mixed`: it has kept some results only. `following`: the
    mark at which the next block of the same forward has begun to compute, if one has."""

    order: int
    shape: Shape | None
    begun: Marker
    ended: Marker
    host_s: float
    is_behind: bool
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
