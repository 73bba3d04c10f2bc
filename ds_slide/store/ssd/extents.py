"""Extents: where the states of a unit lie in the logical address space of the SSD store. Pure integers.

The optimizer state buffers are cut into chunks of CHUNK_NUMEL parameters; a chunk holds its part of every
state buffer one behind the other, so that a chunk is one large transfer each way. The weights' state buffer lies in one
piece before the chunks, because it is also read alone; a held gradient, which is written as a whole, in one piece
behind them. Everything starts and ends at a multiple of the 4 KiB that O_DIRECT wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_slide.errors import SlideError
from ds_slide.store.state_buffers import StateBufferSpec

PAGE = 4096
SUM_BYTES = 4
"""Bytes of the checksum that is kept of every page (`ds_slide.store.ssd.page_sums`)."""
# What an I/O engine takes (csrc/io/engine.cpp): requests at all mounts together, and bytes of one.
MOST_DEPTH, MOST_REQUEST_BYTES = 4096, 1 << 30
# 80 MiB of fp32 states: 13 ms of a 6 GB/s disk and 1.4 ms of CPU update. Large enough that what Python does for a
# chunk (about 0.2 ms) hides behind both, small enough that 16 of them, 1.3 GB, keep reads, updates and writes apart.
CHUNK_NUMEL = 1 << 23


def whole_pages(nbytes: int) -> int:
    """Smallest multiple of a page that is not below `nbytes`."""
    return -(-nbytes // PAGE) * PAGE


def sum_table_bytes(nbytes: int) -> int:
    """Bytes of the checksums of so many bytes on SSD, a multiple of a page."""
    return nbytes // PAGE * SUM_BYTES


@dataclass(frozen=True)
class Chunk:
    """The optimizer states of the parameters `span` of a unit. `starts`: first byte of each state buffer within it, by
    name."""

    span: slice
    offset: int
    nbytes: int
    starts: dict[str, int]


@dataclass(frozen=True)
class UnitExtents:
    """Where a unit lies on SSD. `weight_offset`: of the weights' state buffer, None while weights are in memory;
    `gradient_offset`: of the held gradient, likewise. `chunks`: empty while optimizer states are."""

    weight_offset: int | None
    weight_bytes: int
    chunks: tuple[Chunk, ...]
    gradient_offset: int | None
    end: int

    @property
    def weight_pages(self) -> int:
        """Bytes of a buffer for the weights' state buffer."""
        return whole_pages(self.weight_bytes)

    def what_lies_at(self, offset: int) -> str:
        """What a byte within these extents belongs to, for messages."""
        if self.gradient_offset is not None and offset >= self.gradient_offset:
            return "the held gradient"
        found = [index for index, chunk in enumerate(self.chunks) if chunk.offset <= offset]
        return f"chunk {found[-1]} of the optimizer states" if found else "the weights"


def chunk_bytes(specs: Sequence[StateBufferSpec], numel: int) -> int:
    """Bytes of a chunk of `numel` parameters."""
    return sum(whole_pages(spec.nbytes(numel)) for spec in specs)


def chunk_spans(numel: int, chunk_numel: int) -> list[slice]:
    """The runs of parameters that [0, numel) is cut into."""
    return [slice(start, min(start + chunk_numel, numel)) for start in range(0, numel, chunk_numel)]


def unit_extents(
    start: int,
    specs: Sequence[StateBufferSpec],
    *,
    weight_bytes: int,
    chunks_of: int,
    chunk_numel: int,
    gradient_bytes: int = 0,
) -> UnitExtents:
    """Extents from byte `start` on, a multiple of a page.

    `weight_bytes`: of the whole weights' state buffer, 0 to leave weights in memory. `chunks_of`: trainable parameters
    whose optimizer states go to SSD, 0 to leave them in memory. `gradient_bytes`: of the held gradient, 0 where it is
    not on SSD.
    """
    # A chunk's part of the weights' state buffer is written, and that of a held gradient read, by itself: 2 bytes a
    # parameter at least.
    assert chunk_numel * 2 % PAGE == 0, f"chunks of {chunk_numel} parameters do not begin at whole pages"
    offset = start + whole_pages(weight_bytes)
    chunks = []
    for span in chunk_spans(chunks_of, chunk_numel):
        starts, nbytes = {}, 0
        for spec in specs:
            starts[spec.name] = nbytes
            nbytes += whole_pages(spec.nbytes(span.stop - span.start))
        chunks.append(Chunk(span, offset, nbytes, starts))
        offset += nbytes
    gradient = offset if gradient_bytes else None
    end = offset + whole_pages(gradient_bytes)
    return UnitExtents(start if weight_bytes else None, weight_bytes, tuple(chunks), gradient, end)


# ----------------------------------------------------------------------------------------------------------------------
# How one logical address space is cut over the files of several mounts. Pure integers, no I/O.
#
# The space is a row of units; a short pattern, repeated, says to which file each unit goes. The pattern is chosen so
# that every run of one period gives each file bytes in proportion to its bandwidth, wherever the run starts: a
# transfer of that size then ends on all mounts at about the same time.

# As large as one request of the I/O engine, so that striping cuts no more often than the engine does.
UNIT_BYTES = 2 << 20
# 64 MiB with the unit above: smaller than a chunk of optimizer states (80 MiB), and fine enough for any ratio of
# bandwidths to be met within a few per cent.
LONGEST_PERIOD = 32
# A shorter pattern is taken when it is at most this much slower than the best one: measured bandwidths are not better.
TOLERANCE = 0.02


class Piece(NamedTuple):
    """`nbytes` at `file_offset` of file number `file`; they are the bytes from `start` on of the transfer."""

    file: int
    file_offset: int
    start: int
    nbytes: int


class Striping:
    """A bijection between logical bytes and (file, byte). With one file it is the identity.

    `weights`: bandwidths of the files, in any unit. A file that would get less than one unit in LONGEST_PERIOD is left
    out (its size is 0): waiting for it would cost more than it brings.
    """

    def __init__(self, weights: Sequence[float], unit_bytes: int = UNIT_BYTES) -> None:
        if not weights or not all(0 < weight < float("inf") for weight in weights):
            raise SlideError(f"SSD tier: bandwidths of the files must be positive numbers, not {list(weights)}")
        if unit_bytes <= 0 or unit_bytes % 4096:
            raise SlideError(f"SSD tier: a stripe must be a positive multiple of 4096 bytes, not {unit_bytes}")
        self._unit = unit_bytes
        self.pattern = _pattern(weights)
        """File of each unit of a period."""
        self._shares = [self.pattern.count(file) for file in range(len(weights))]
        self._before = [self.pattern[:index].count(file) for index, file in enumerate(self.pattern)]

    @property
    def shares(self) -> list[float]:
        """Part of every file in the whole; their sum is 1."""
        return [share / len(self.pattern) for share in self._shares]

    def pieces(self, offset: int, nbytes: int) -> list[Piece]:
        """The runs within files that hold [offset, offset + nbytes), in logical order; neighbours are joined."""
        if offset < 0 or nbytes < 0:
            raise SlideError(f"SSD tier: {nbytes} bytes at byte {offset} are not a range")
        period = len(self.pattern)
        if len(self._shares) == 1 and nbytes:
            return [Piece(0, offset, 0, nbytes)]
        pieces: list[Piece] = []
        end = offset + nbytes
        at = offset
        while at < end:
            unit, within = divmod(at, self._unit)
            turn, place = divmod(unit, period)
            file = self.pattern[place]
            length = min(self._unit - within, end - at)
            file_offset = (turn * self._shares[file] + self._before[place]) * self._unit + within
            last = pieces[-1] if pieces else None
            if last and last.file == file and last.file_offset + last.nbytes == file_offset:
                pieces[-1] = last._replace(nbytes=last.nbytes + length)
            else:
                pieces.append(Piece(file, file_offset, at - offset, length))
            at += length
        return pieces

    def file_sizes(self, nbytes: int) -> list[int]:
        """Bytes of each file that [0, nbytes) needs; they add up to `nbytes`."""
        period_bytes = len(self.pattern) * self._unit
        turns, rest = divmod(nbytes, period_bytes)
        sizes = [turns * share * self._unit for share in self._shares]
        for piece in self.pieces(0, rest):
            sizes[piece.file] += piece.nbytes
        return sizes


def _pattern(weights: Sequence[float]) -> list[int]:
    """Each unit goes to the file that would be done with it first: no other choice ends a prefix earlier.

    Of the prefixes the shortest is taken whose slowest file is within TOLERANCE of that of the best.
    """
    counts = [0] * len(weights)
    order: list[int] = []
    costs: list[float] = []
    for length in range(1, LONGEST_PERIOD + 1):
        file = min(range(len(weights)), key=lambda file: (counts[file] + 1) / weights[file])
        counts[file] += 1
        order.append(file)
        slowest = max(count / weight for count, weight in zip(counts, weights, strict=True))
        costs.append(slowest / length)
    best = min(costs)
    return order[: next(length for length, cost in enumerate(costs, 1) if cost <= best * (1 + TOLERANCE))]
