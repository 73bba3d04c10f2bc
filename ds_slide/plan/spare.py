"""How much GPU memory is spare, what may take it, and what leaves it again when a batch needs it.

Pure functions over what the first steps have shown. Bytes are bytes of the GPU. `ds_slide.plan.sharing` decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ds_slide.plan.needs import Needs

FRAGMENTATION = 0.2
"""Memory that torch's allocator holds beyond what is allocated, as a part of the activations. Activations kept in spare
memory do not count: 0.15 to 0.20 (page main_2 of 2026-11-21), 0.9 GB beside 51.7 that were kept
(benchmarks/results/2026-11-23_nvidia-h200_spare-memory.jsonl). 3 B with 48 x 2048 tokens in 24 GiB did not find 2.02
GiB in one piece while 2.23 were free (benchmarks/results/2026-11-23_nvidia-h200_choosing.md)."""
BLOCKS_UNDER_WAY = 2
"""Blocks whose inputs have not yet left the GPU when the last block has computed, where all inputs move."""
LEAST_AHEAD, MOST_AHEAD = 2, 8
"""Inputs of blocks that are read from SSD ahead of their use. A disk of 3 GB/s reads an input of 67 MB in 22 ms, beside
15 ms of a block's backward. A disk that is slower than the blocks holds them up with any number."""
SPARE_SSD_SHARE = 1 / 2
"""Part of a disk's free space that inputs of blocks may take: a checkpoint may have to go there, too."""


@dataclass(frozen=True)
class GpuShares:
    """Parts of a GPU's memory."""

    margin: float = 1 / 16
    """Part of the GPU that is left free. Torch takes memory from the driver in steps of 2 MiB, so that a saved tensor
    of 32 MiB (8k tokens of a model 2,048 wide) may take a sixteenth more. It cannot always use what lies between two
    live tensors. What differs from step to step without a longer batch (experts that get more tokens) has to fit in
    here, too."""
    most_margin: float = 4 * margin
    """The margin's limit, where torch has had to search for room again and again."""
    roomy: float = 1 / 8
    """Part of the GPU. Where a batch leaves less than this beside the margin, what it keeps can be given up. That costs
    the host some 10 us an operator."""
    roomy_for_others: float = 1 / 4
    """The same part for evaluations and the first forward of a generation, whose needs are less well known."""
    roomy_for_tokens: float = 1 / 32
    """The same part for the later forwards of a generation, of one token each."""
    unmeasured: float = 1 / 4
    """Part of the free GPU memory that inputs of blocks may take in the first steps. A block that is recomputed saves
    10 to 30 times its input. So with 36 blocks and a fused loss the rest takes no more than the inputs do, and both
    together half of the memory."""


GPU_SHARES = GpuShares()


class Handling(Enum):
    """What becomes of a block's saved tensors between its forward and its backward. These are the names in statistics;
    `Activations` decides without them, from `Kept` and the blocks whose inputs move."""

    KEEP = "keep"
    """They stay on the GPU."""
    RECOMPUTE = "recompute"
    """The block's input stays, and its forward runs again in backward."""
    MIX = "mix"
    """The same as `RECOMPUTE`, except that the results of some operators stay on the GPU."""
    MOVE = "move"
    """The same as `RECOMPUTE`, and the block's input waits in host memory or on SSD."""


@dataclass(frozen=True)
class Shape:
    """The size of a batch. `tokens`: total number. `length`: tokens of a sequence."""

    tokens: int
    length: int

    def has_square(self, sizes: Sequence[int]) -> bool:
        """Whether a tensor of these sizes may have an element for each pair of tokens of a sequence in a batch of this
        shape. Probabilities of attention and its mask have. A prefix makes one of the dimensions longer.

        A dimension of a layer may be taken for a dimension of tokens, too. Then more memory is left free than is
        needed, until a batch of another length is measured."""
        return sum(self.length <= size <= 1.25 * self.length for size in sizes) >= 2


@dataclass(frozen=True)
class Measured:
    """Bytes that a batch of this shape has taken.

    `square`: bytes of tensors with an element for each pair of tokens of a sequence; they grow with tokens times
    length. `fixed`: bytes that do not grow with the batch, like gradients of weights. All others grow at most with
    tokens."""

    shape: Shape
    nbytes: int
    square: int
    fixed: int = 0

    def at(self, shape: Shape) -> float:
        """Return the most bytes that a batch of another shape can take."""
        tokens, longer = shape.tokens / self.shape.tokens, max(1.0, shape.length / self.shape.length)
        fixed = min(self.fixed, self.nbytes - self.square) if tokens > 1 else 0
        return fixed + tokens * (self.nbytes - fixed - self.square + self.square * longer)

    def growth(self, shape: Shape) -> float:
        """Return the largest growth of the bytes at another shape, as a factor; below 1 where that is smaller."""
        return self.at(shape) / self.nbytes if self.nbytes else shape.tokens / self.shape.tokens


def fixed_bytes(points: Iterable[tuple[Shape, int]], most: int) -> int:
    """Return the bytes that a batch takes with any number of tokens, from the bytes of two batches: at most `most`, and
    0 where the batches tell nothing. One of them has at least 1.25 times the tokens of the other."""
    ordered = sorted(points, key=lambda each: each[0].tokens)
    if not ordered or ordered[-1][0].tokens < 1.25 * ordered[0][0].tokens:
        return 0
    (few, least), (many, largest) = ordered[0], ordered[-1]
    a_token = max(0.0, (largest - least) / (many.tokens - few.tokens))
    return max(0, min(most, int(least - a_token * few.tokens)))


@dataclass(frozen=True)
class Input:
    """The input that a block's calls in one forward get from the blocks before."""

    order: int
    nbytes: int


@dataclass(frozen=True)
class Movable:
    """A unit whose states may go to the GPU. `share`: part of all elements that the host updates. `streamed`: it passes
    through the window until then. `disk_share`: part of all states on SSD."""

    order: int
    nbytes: int
    share: float
    streamed: bool = True
    disk_share: float = 0.0


@dataclass(frozen=True)
class Summable:
    """A unit whose gradients may be added up on the GPU, in a buffer of `nbytes`. `share`: part of the additions on the
    host. `down_share`: part of the copies of gradients to the host that are made no more. `additions`: number of a
    step."""

    order: int
    nbytes: int
    share: float
    down_share: float
    additions: int


@dataclass(frozen=True)
class Slots:
    """The window: `count` slots of `nbytes` each. Slots beyond `least` hide no fetch, and only save some. `blocks`:
    number of blocks that pass through it, `passes` times a step (forward and backward of each micro-batch). `grows`:
    there may be more slots, at most one a block."""

    count: int
    least: int
    nbytes: int
    blocks: int
    passes: int = 2
    grows: bool = False

    def fitting(self, room: float, gone: int) -> int | None:
        """Return how many slots stay when `gone` blocks pass no more; None where these are too few. `room`: bytes left
        beside the present slots; negative where bytes are missing."""
        wanted = min(self.count, blocks := self.blocks - gone)
        if room < 0 and self.nbytes:
            wanted = min(wanted, int((room + self.count * self.nbytes) // self.nbytes))
        enough = wanted >= min(self.least, self.count, blocks) and room + (self.count - wanted) * self.nbytes >= 0
        return wanted if enough else None

    def most(self, room: float, gone: int, count: int) -> int:
        """Return the most slots when `gone` blocks pass no more. `room`: bytes left beside `count` slots."""
        if not self.grows or not self.nbytes or room < self.nbytes:
            return count
        return max(count, min(self.blocks - gone, count + int(room // self.nbytes)))

    def after(self, coming: int) -> int:
        """Return the number of slots when `coming` more blocks pass: the present number, or the least where that is
        more."""
        return max(self.count, min(self.least, self.blocks + coming))

    def fetches(self, gone: int, count: int) -> int:
        """Return the fetches of a step: all blocks in its first forward, and later the blocks that have left their
        slot."""
        blocks = self.blocks - gone
        return blocks + (self.passes - 1) * max(0, blocks - count)


NO_SLOTS = Slots(0, 0, 0, 0)


def least_slots(window: int, needs: Needs) -> int:
    """Return how many of `window` slots must stay: all of them where the user has set the size. Otherwise one beside
    the slots that hide a fetch stays, for a fetch that waits for its block's update while compute goes on."""
    return min(window, needs.window + 1) if needs.window_grows else window


def spare_bytes(free: float, needed: float, margin: float) -> float:
    """Return `free` less `needed` and a reserve: the margin, or what the allocator cannot use, whichever is more. A
    negative result is the number of bytes missing. `needed`: bytes of a batch with nothing kept."""
    return free - needed - max(margin, FRAGMENTATION * needed)


def inputs_missing(free: float, needed: float, margin: float) -> float:
    """Return the bytes of inputs that have to leave so that the batch fits; negative where none have to. They are fewer
    than the missing bytes where fragmentation shrinks with them."""
    return max(margin + needed - free, needed - free / (1 + FRAGMENTATION))


def movable_inputs(inputs: Sequence[Input]) -> Sequence[Input]:
    """Return the inputs that may wait in host memory, from the inputs in call order. The last inputs would still be on
    their way down when the memory is needed most, in the loss."""
    return inputs[:-BLOCKS_UNDER_WAY]


def moved_within(missing: float, available: float, inputs: Sequence[Input]) -> frozenset[int]:
    """Return the blocks whose inputs leave the GPU so that `missing` bytes come free there. `available`: bytes that
    they may take of host memory and SSD. First blocks are chosen first: most time passes between their forward and
    backward, and hides their copies."""
    chosen = []
    for each in movable_inputs(inputs):
        if missing <= 0 or each.nbytes > available:
            break
        chosen.append(each.order)
        missing -= each.nbytes
        available -= each.nbytes
    return frozenset(chosen)


class Places(Protocol):
    """Where inputs of blocks may wait."""

    def on_host(self, wanted: int) -> float:
        """Return the bytes that host memory has room for. `wanted`: the most that count."""

    def on_ssd(self, wanted: int, input_bytes: int) -> float:
        """Return the bytes that SSD has room for, in inputs of at most `input_bytes` each. 0 where host memory has no
        room for the buffers in front of it. `wanted`: the most that count."""


def inputs_to_move(missing: float, inputs: Sequence[Input], places: Places) -> frozenset[int]:
    """Return the blocks whose inputs leave the GPU for `places` so that `missing` bytes come free there. SSD is used
    where host memory has no room for all inputs that may move."""
    movable = movable_inputs(inputs)
    wanted = sum(each.nbytes for each in movable)
    available = places.on_host(wanted)
    if available < wanted:
        available += places.on_ssd(wanted - int(available), max(each.nbytes for each in movable))
    return moved_within(missing, available, inputs)


def goes_on(moved: Sequence[Input], available: float) -> frozenset[int]:
    """Return the blocks whose inputs go on to SSD. `moved`: inputs that leave the GPU, in call order. `available`:
    bytes of host memory for them. The first inputs go on, because they come back last."""
    for count, each in enumerate(reversed(moved)):
        available -= each.nbytes
        if available < 0:
            return frozenset(gone.order for gone in moved[: len(moved) - count])
    return frozenset()


def reads_ahead(read_s: float, backward_s: float) -> int:
    """Return how many inputs to read from SSD ahead of their use, so that backward hides the reads. `read_s`,
    `backward_s`: seconds of each read and of each block's backward; 0: not known."""
    wanted = math.ceil(read_s / backward_s) if backward_s else 0
    return min(max(wanted, LEAST_AHEAD), MOST_AHEAD)


def buffers_for(ahead: int) -> int:
    """Return the number of host buffers, of one input each, for `ahead` inputs that are read ahead from SSD. One more
    input is copied, and one is filled meanwhile."""
    return ahead + 2


def moves_unmeasured(nbytes: int, free: float) -> bool:
    """Whether inputs of blocks wait in host memory before a batch's other needs are known. `nbytes`: bytes of all
    inputs. `free`: bytes of the GPU."""
    return nbytes > GPU_SHARES.unmeasured * free


def given_back(missing: float, claimed: Sequence[Movable], slots: Slots = NO_SLOTS) -> frozenset[int]:
    """Return the units whose states leave the GPU so that `missing` bytes come free. The units that came last leave
    first; all leave where that does not suffice. The blocks among them take slots where there are fewer than the least.
    """
    chosen: list[int] = []
    freed, coming = 0, 0
    for each in reversed(claimed):
        if freed - (slots.after(coming) - slots.count) * slots.nbytes >= missing:
            break
        chosen.append(each.order)
        freed += each.nbytes
        coming += each.streamed
    return frozenset(chosen)
