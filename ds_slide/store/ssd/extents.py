"""Extents: where the states of a unit lie in the logical address space of the SSD store. Pure integers.

The optimizer state buffers are cut into chunks of CHUNK_NUMEL parameters. A chunk holds its part of every state buffer
in turn, so that a chunk is one large transfer each way. The weights' state buffer lies in one piece before the chunks,
because it is also read alone. A held gradient is written as a whole and lies in one piece behind the chunks. Every part
starts and ends at a multiple of the 4 KiB that O_DIRECT needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_slide.errors import SlideError
from ds_slide.store.state_buffers import StateBufferSpec

PAGE = 4096
# Limits of an I/O engine (csrc/io/engine.cpp): requests at all mounts together, and bytes of one request.
MOST_DEPTH, MOST_REQUEST_BYTES = 4096, 1 << 30
REQUEST_BYTES = 2 << 20
"""Bytes of one request of the I/O engine, unless the JSON says otherwise, and of a stripe over several mounts: so
striping cuts no more often than the engine does."""
# 80 MiB of fp32 states: 13 ms of a 6 GB/s disk and 1.4 ms of CPU update. A chunk is so large that Python's work for it
# (about 0.2 ms) hides behind both. It is so small that 16 chunks, 1.3 GB, keep reads, updates and writes apart.
CHUNK_NUMEL = 1 << 23


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def sum_table_bytes(nbytes: int) -> int:
    """Return the bytes of the checksums for `nbytes` on SSD, a multiple of a page. Each page has one of 4 bytes
    (`ds_slide.store.ssd.page_sums`)."""
    return nbytes // PAGE * 4


@dataclass(frozen=True)
class Chunk:
    """The optimizer states of the parameters `span` of a unit. `starts`: the first byte of each state buffer in the
    chunk, by name."""

    span: slice
    offset: int
    nbytes: int
    starts: dict[str, int]


@dataclass(frozen=True)
class UnitExtents:
    """The place of a unit on SSD. `weight_offset`, `gradient_offset`: where the weights' state buffer and the held
    gradient begin, None for a part that is in memory. `chunks`: empty where optimizer states are in memory."""

    weight_offset: int | None
    weight_bytes: int
    chunks: tuple[Chunk, ...]
    gradient_offset: int | None
    end: int

    def what_lies_at(self, offset: int) -> str:
        """Return words for the part that a byte of these extents belongs to, for messages."""
        if self.gradient_offset is not None and offset >= self.gradient_offset:
            return "the held gradient"
        found = [index for index, chunk in enumerate(self.chunks) if chunk.offset <= offset]
        return f"chunk {found[-1]} of the optimizer states" if found else "the weights"


@dataclass(frozen=True)
class Contents:
    """Words for the bytes of a store, for messages. `units`: extents with the names of their units, in the order of
    their offsets. `others`: the words for bytes behind them."""

    units: Sequence[tuple[str, UnitExtents]] = ()
    others: str = "other states"

    def at(self, offset: int) -> str:
        found = next(((name, place) for name, place in self.units if offset < place.end), None)
        return self.others if found is None else f"{found[1].what_lies_at(offset)} of {found[0]}"


def chunk_bytes(specs: Sequence[StateBufferSpec], numel: int) -> int:
    """Return the bytes of a chunk of `numel` parameters."""
    return sum(whole_pages(spec.nbytes(numel)) for spec in specs)


def chunk_spans(numel: int, chunk_numel: int) -> list[slice]:
    """Cut [0, numel) into spans of at most `chunk_numel` parameters."""
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
    """Lay out a unit from byte `start` on, a multiple of a page.

    `weight_bytes`: bytes of the weights' state buffer, 0 to leave weights in memory. `chunks_of`: trainable parameters
    whose optimizer states go to SSD, 0 to leave them in memory. `gradient_bytes`: bytes of the held gradient, 0 where
    it is not on SSD.
    """
    # A chunk's part of the weights is written by itself, and its part of a held gradient is read by itself. Both have
    # at least 2 bytes a parameter.
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
# The space is a sequence of stripe units. A short repeated pattern gives the file of each unit. Every span of one
# period has bytes of each file in proportion to its bandwidth, at any start. So a transfer of that size ends on all
# mounts at about the same time.

# 64 MiB with units of REQUEST_BYTES: smaller than a chunk of optimizer states (80 MiB), and fine enough for any ratio
# of bandwidths to be met within a few per cent.
LONGEST_PERIOD = 32


class Piece(NamedTuple):
    """`nbytes` at `file_offset` of file number `file`. In the transfer they begin at byte `start`."""

    file: int
    file_offset: int
    start: int
    nbytes: int


class Striping:
    """A bijection between logical bytes and (file, byte). With one file it is the identity.

    `weights`: bandwidths of the files, in any unit. A file with a share below one unit in LONGEST_PERIOD is left out
    (its size is 0): waiting for it would cost more than it brings.
    """

    def __init__(self, weights: Sequence[float], unit_bytes: int = REQUEST_BYTES) -> None:
        if not weights or not all(0 < weight < float("inf") for weight in weights):
            raise SlideError(f"SSD tier: bandwidths of the files must be positive numbers, not {list(weights)}")
        if unit_bytes <= 0 or unit_bytes % 4096:
            raise SlideError(f"SSD tier: a stripe must be a positive multiple of 4096 bytes, not {unit_bytes}")
        self._unit = unit_bytes
        self.pattern = _pattern(weights)
        """The file of each unit of a period."""
        self._shares = [self.pattern.count(file) for file in range(len(weights))]
        self._before = [self.pattern[:index].count(file) for index, file in enumerate(self.pattern)]

    @property
    def shares(self) -> list[float]:
        """The share of each file. Their sum is 1."""
        return [share / len(self.pattern) for share in self._shares]

    def pieces(self, offset: int, nbytes: int) -> list[Piece]:
        """Return the pieces of files that hold [offset, offset + nbytes), in logical order. Neighbours are joined."""
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
        """Return the bytes of each file for [0, nbytes). Their sum is `nbytes`."""
        period_bytes = len(self.pattern) * self._unit
        turns, rest = divmod(nbytes, period_bytes)
        sizes = [turns * share * self._unit for share in self._shares]
        for piece in self.pieces(0, rest):
            sizes[piece.file] += piece.nbytes
        return sizes


def _pattern(weights: Sequence[float]) -> list[int]:
    """Give each unit to the file that would end it first: no other choice ends a prefix earlier.

    The result is the shortest prefix with a cost within 2 % of the best, because bandwidths are not measured more
    exactly. The slowest file sets the cost.
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
    return order[: next(length for length, cost in enumerate(costs, 1) if cost <= best * 1.02)]
