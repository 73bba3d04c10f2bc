"""How one logical address space is cut over the files of several mounts. Pure integers, no I/O.

The space is a row of units; a short pattern, repeated, says to which file each unit goes. The pattern is chosen so that
every run of one period gives each file bytes in proportion to its bandwidth, wherever the run starts: a transfer of
that size then ends on all mounts at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_slide.errors import SlideError

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
