"""What spare GPU memory is used for: states of blocks, which are then updated there, or activations that are kept.

Pure functions over what the first steps have shown. Seconds are those of one step, bytes those of the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from ds_slide.plan.keeping import Keepable, fillings
from ds_slide.plan.needs import Needs
from ds_slide.plan.two_passes import FIRST_PASS, Schedule

MARGIN_SHARE = 1 / 16
"""Of the GPU, and left free. Torch takes memory from the driver in steps of 2 MiB, so that a saved tensor of 32 MiB (8k
tokens of a model 2,048 wide) may take a sixteenth more, and it cannot always use what lies between two live tensors.
What differs from step to step without a longer batch (experts that get more tokens) has to fit in here, too."""
MOST_MARGIN_SHARE = 4 * MARGIN_SHARE
"""Where torch has had to search for room again and again."""
FRAGMENTATION = 0.2
"""Of the activations: what torch's allocator holds beyond what is allocated, without those that are kept in spare
memory: 0.15 to 0.20 (page main_2 of 2026-11-21), 0.9 GB beside 51.7 that were kept
(benchmarks/results/2026-11-23_nvidia-h200_spare-memory.jsonl). 3 B with 48 x 2048 tokens in 24 GiB did not find 2.02
GiB in one piece while 2.23 were free (benchmarks/results/2026-11-23_nvidia-h200_choosing.md)."""
BLOCKS_UNDER_WAY = 2
"""Whose inputs are not yet gone when the last block has computed, where all of them move."""
UNMEASURED_SHARE = 1 / 4
"""Of the free GPU memory, that inputs of blocks may take in the first steps. A block that is recomputed saves 10 to 30
times its input, so that with 36 blocks and a fused loss the rest takes no more than the inputs do, and all of it half
of the memory."""
LEAST_AHEAD, MOST_AHEAD = 2, 8
"""Inputs of blocks that are read from SSD ahead of their use. A disk of 3 GB/s reads one of 67 MB in 22 ms, beside 15
of a block's backward. A disk that is slower than the blocks holds them up with any number."""
SPARE_SSD_SHARE = 1 / 2
"""Of the free space of a disk, that inputs of blocks may take: a checkpoint may have to go there, too."""
MEMORY_RATE = 1e12
"""Bytes a second that an update on the GPU reads and writes where nobody knows it; of a card of the middle class, so
that no state is moved for a gain that its own update takes back."""


class Handling(Enum):
    """What becomes of a block's saved tensors between its forward and its backward."""

    KEEP = "keep"
    """They stay on the GPU."""
    RECOMPUTE = "recompute"
    """The block's input stays, and its forward runs again in backward."""
    MIX = "mix"
    """As `RECOMPUTE`, but for the results of some operators, which stay on the GPU."""
    MOVE = "move"
    """As `RECOMPUTE`, and the block's input waits in host memory, or on SSD."""


@dataclass(frozen=True)
class Shape:
    """The size of a batch. `tokens`: in all. `length`: of a sequence."""

    tokens: int
    length: int

    def growth(self, other: Shape) -> float:
        """The most by which what was measured at this shape can grow at `other`; below 1 where that is smaller.

        Attention that saves its probabilities takes memory by tokens times length, everything else by tokens.
        """
        return other.tokens / self.tokens * max(1.0, other.length / self.length)


@dataclass(frozen=True)
class Input:
    """What the calls of a block in one forward get from the blocks before."""

    order: int
    nbytes: int


@dataclass(frozen=True)
class Movable:
    """A unit whose states may go to the GPU. `share`: of all elements that the host updates. `streamed`: it
    passes through the window until then. `disk_share`: of all states on SSD."""

    order: int
    nbytes: int
    share: float
    streamed: bool = True
    disk_share: float = 0.0


@dataclass(frozen=True)
class Slots:
    """The window: `count` slots of `nbytes` each, of which those beyond `least` hide no fetch, and only save some.
    `blocks`: that pass through it, `passes` times a step (forward and backward of each micro-batch)."""

    count: int
    least: int
    nbytes: int
    blocks: int
    passes: int = 2

    def fitting(self, room: float, gone: int) -> int | None:
        """How many stay when `gone` blocks pass no more and `room` bytes are left beside the present ones, or are
        missing; None where that are too few."""
        wanted = min(self.count, blocks := self.blocks - gone)
        if room < 0 and self.nbytes:
            wanted = min(wanted, int((room + self.count * self.nbytes) // self.nbytes))
        enough = wanted >= min(self.least, self.count, blocks) and room + (self.count - wanted) * self.nbytes >= 0
        return wanted if enough else None

    def after(self, coming: int) -> int:
        """How many there are when `coming` blocks more pass: no more than before, and the least."""
        return max(self.count, min(self.least, self.blocks + coming))

    def fetches(self, gone: int, count: int) -> int:
        """Of a step: all blocks that pass in its first forward, and later those that are in no slot any more."""
        blocks = self.blocks - gone
        return blocks + (self.passes - 1) * max(0, blocks - count)


NO_SLOTS = Slots(0, 0, 0, 0)
SPARE_SLOTS = 1
"""Beside those that hide a fetch: for a fetch that waits for the update of its block while compute goes on."""


def least_slots(window: int, needs: Needs) -> int:
    """Slots that a window of so many keeps: all of them where the user has set its size."""
    return min(window, needs.window + SPARE_SLOTS) if needs.window_grows else window


@dataclass(frozen=True)
class StepTimes:
    """One measured step. `compute`: when the GPU computed. `stall`: when it waited for transfers and updates. `lane`:
    of the busiest of the other lanes of this machine's processors and bus. `fetch`: of the one that brings blocks.
    `queue`: seconds of the updates that one wait is for, of all units. `disk`: of the SSD. `of_states`: the part of
    these that states take; inputs of blocks, which have the rest, do not leave with them."""

    compute: float
    stall: float
    lane: float
    fetch: float = 0.0
    queue: float = 0.0
    disk: float = 0.0
    of_states: float = 1.0

    @classmethod
    def of(
        cls, busy: Mapping[str, float], step_s: float, schedule: Schedule, *, inputs: int = 0, on_ssd: int = 0
    ) -> StepTimes:
        """Of a step of `step_s` seconds in which the lanes were `busy` for so many. `inputs`: bytes of inputs of
        blocks, of the `on_ssd` that the disk has read and written."""
        compute = busy["compute"]
        lane = max((seconds for lane, seconds in busy.items() if lane not in ("compute", "ssd")), default=0.0)
        updates = busy.get("update", 0.0)
        queue = FIRST_PASS * updates if schedule == "two passes" else updates
        if schedule == "under backward":
            queue = lane
        of_states = 1.0 - min(1.0, inputs / on_ssd) if on_ssd else 1.0
        stall, fetch, disk = max(0.0, step_s - compute), busy.get("h2d", 0.0), busy.get("ssd", 0.0)
        return cls(compute, stall, lane, fetch, queue, disk, of_states)

    def predicted(
        self,
        recomputed_less: float,
        moved_share: float,
        updates: float,
        fetched: float = 1.0,
        disk_share: float = 0.0,
    ) -> float:
        """Of a step with so many seconds less of recomputation, so much of the host's work gone, seconds of updates on
        the GPU, so many times the fetches, and so much of the disk's work on states gone: what is hidden costs nothing,
        until what hides it has become shorter.

        The GPU waits for the end of a queue, and what leaves it shortens the wait second for second, until it is over:
        with updates under backward the end comes after the backward (7.6 B waited 0.32 s of 1.50, and 0.05 s of 1.24
        when 12 of its 28 blocks had moved), with deferred ones under the next forward, whose last block waits longest.
        Where a disk is busy for longer than a queue, the updates themselves wait for it.
        """
        computes = self.compute - recomputed_less + updates
        disk_share *= self.of_states
        if self.disk > self.queue:
            gone = max(self.stall, self.disk) * disk_share
        else:
            gone = max(self.stall, self.queue) * moved_share
        lanes = self.lane * (1.0 - moved_share), self.fetch * fetched, self.disk * (1.0 - disk_share)
        return max(computes + max(0.0, self.stall - gone), *lanes)


@dataclass(frozen=True)
class Choice:
    """`states`: units whose states go to the GPU. `kept`: number of blocks whose activations then fit, `mixed`: of
    those that keep some results. `seconds`: of the step that is expected. `slots`: that the window has then."""

    states: frozenset[int]
    kept: int
    seconds: float
    slots: int = 0
    mixed: int = 0


def spare_bytes(free: float, needed: float, margin: float) -> float:
    """Of `free` bytes those that a batch leaves which needs so many with nothing kept, or, less than 0, that it lacks:
    beside a margin, or what the allocator cannot use, where that is more."""
    return free - needed - max(margin, FRAGMENTATION * needed)


def inputs_missing(free: float, needed: float, margin: float) -> float:
    """Bytes of inputs that have to go elsewhere so that such a batch lacks nothing: fewer than it lacks where what the
    allocator cannot use becomes less with them. Less than 0 where none have to."""
    return max(margin + needed - free, needed - free / (1 + FRAGMENTATION))


def movable_inputs(inputs: Sequence[Input]) -> Sequence[Input]:
    """Those that may wait in host memory, of the blocks in the order of their calls: those of the last ones are still
    on their way down when the memory is needed most, in the loss."""
    return inputs[:-BLOCKS_UNDER_WAY]


def moved_within(missing: float, available: float, inputs: Sequence[Input]) -> frozenset[int]:
    """Blocks whose inputs leave the GPU so that `missing` bytes come free there, for host memory and SSD, of which
    `available` bytes may be taken: the first ones, which have the longest way between forward and backward to hide
    their copies in."""
    chosen = []
    for each in movable_inputs(inputs):
        if missing <= 0 or each.nbytes > available:
            break
        chosen.append(each.order)
        missing -= each.nbytes
        available -= each.nbytes
    return frozenset(chosen)


def goes_on(moved: Sequence[Input], available: float) -> frozenset[int]:
    """Blocks whose inputs go on to SSD, of those that move, in the order of their calls, where host memory has
    `available` bytes for them: the first ones, which come back last."""
    for count, each in enumerate(reversed(moved)):
        available -= each.nbytes
        if available < 0:
            return frozenset(gone.order for gone in moved[: len(moved) - count])
    return frozenset()


def reads_ahead(read_s: float, backward_s: float) -> int:
    """Inputs that are read from SSD ahead of their use, in `read_s` seconds each, so that the backward of blocks, of
    `backward_s` seconds each, hides that. 0: not known."""
    wanted = math.ceil(read_s / backward_s) if backward_s else 0
    return min(max(wanted, LEAST_AHEAD), MOST_AHEAD)


def buffers_for(ahead: int) -> int:
    """Host buffers, of one input each, through which inputs come from SSD where so many are read ahead: one more is
    copied, and one is filled meanwhile."""
    return ahead + 2


def moves_unmeasured(nbytes: int, free: float) -> bool:
    """Whether inputs of blocks, of `nbytes` in all, wait in host memory before it is known what a batch needs beside
    them, with `free` bytes of the GPU."""
    return nbytes > UNMEASURED_SHARE * free


def choose(
    room: float,
    states: Sequence[Movable],
    activations: Collection[Keepable],
    times: StepTimes,
    slots: Slots = NO_SLOTS,
    memory_rate: float = MEMORY_RATE,
) -> Choice:
    """The shortest step that `room` bytes allow, of those the one that takes the fewest bytes. `memory_rate`: bytes a
    second of the GPU's memory.

    `states` go in the order in which they are given, and activations by their value, so that a choice is two numbers,
    and all pairs of them are looked at. `kept` and `mixed` are what is expected; what is left in the end decides in
    each forward.
    Slots beyond the least give way to states, and go anyway where fewer blocks pass than there are slots.
    """
    filled = fillings(activations)
    state_bytes = list(accumulate((each.nbytes for each in states), initial=0))
    shares = list(accumulate((each.share for each in states), initial=0.0))
    disk_shares = list(accumulate((each.disk_share for each in states), initial=0.0))
    passing = list(accumulate((int(each.streamed) for each in states), initial=0))
    fetches = slots.fetches(0, slots.count)
    best = Choice(frozenset(), 0, times.predicted(0.0, 0.0, 0.0), slots.count)
    least = best.seconds, 0
    moves = zip(state_bytes, shares, disk_shares, passing, strict=True)
    for moved, (taken, share, disk_share, gone) in enumerate(moves):
        updates = 2 * taken / memory_rate
        for filling in filled:
            left = room - taken - filling.nbytes
            count = slots.fitting(left, gone) if moved else slots.count if left >= 0 else None
            if count is None:
                break
            fetched = slots.fetches(gone, count) / fetches if fetches else 1.0
            expected = times.predicted(filling.seconds, share, updates, fetched, disk_share)
            if (expected, taken + filling.nbytes) < least:
                least = expected, taken + filling.nbytes
                orders = frozenset(each.order for each in states[:moved])
                best = Choice(orders, filling.whole, expected, count, filling.mixed)
    return best


def given_back(missing: float, claimed: Sequence[Movable], slots: Slots = NO_SLOTS) -> frozenset[int]:
    """Units whose states leave the GPU so that `missing` bytes come free: those that went there last, first. All of
    them where that does not suffice. The blocks among them take slots where there are fewer than the least."""
    chosen: list[int] = []
    freed, coming = 0, 0
    for each in reversed(claimed):
        if freed - (slots.after(coming) - slots.count) * slots.nbytes >= missing:
            break
        chosen.append(each.order)
        freed += each.nbytes
        coming += each.streamed
    return frozenset(chosen)
