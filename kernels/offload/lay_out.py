"""Pieces of one flat buffer to their places in another one, in one launch: the weights that ranks have gathered.

torch copies many slices with one launch, too, but a slice of each piece takes the host 0.4 ms for the weights of a
block of 12 parameters on two ranks, and a step has 36 of them one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ds_slide.kernels.launch import Compiled, aligned, launch, unit_of

# Elements of one program.
BLOCK = 8192
CHUNK = 1024
NUM_WARPS = 8
# What elements of so many bytes are copied as: not every GPU has loads of every data type (8-bit floats).
COPIED_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPILED: Compiled = {}


@triton.jit
def _lay_out_kernel(
    source, target, table, COUNT: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    program = tl.program_id(0)
    index = tl.sum((tl.load(table + tl.arange(0, COUNT)) <= program).to(tl.int32), axis=0) - 1
    local = (program - tl.load(table + index)) * BLOCK
    source += tl.load(table + COUNT + index) * UNIT + local
    target += tl.load(table + 2 * COUNT + index) * UNIT + local
    left = tl.load(table + 3 * COUNT + index) - local
    if left >= BLOCK:  # without masks, which would break the vector loads
        lanes = tl.arange(0, BLOCK)
        tl.store(target + lanes, tl.load(source + lanes))
    else:
        for step in range(0, BLOCK, CHUNK):
            lanes = step + tl.arange(0, CHUNK)
            tl.store(target + lanes, tl.load(source + lanes, mask=lanes < left), mask=lanes < left)


class Pieces:
    """Pieces of a flat buffer."""

    def __init__(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """`spans`: (start, start in the other buffer, elements) of each piece. None is empty."""
        self.count = triton.next_power_of_2(len(spans))
        sources, targets, numels = zip(*spans, strict=True)
        self.unit = unit_of((*sources, *targets))
        programs = [-(-numel // BLOCK) for numel in numels]
        firsts = list(itertools.accumulate(programs, initial=0))
        self.programs = firsts.pop()
        rows = (firsts, [each // self.unit for each in sources], [each // self.unit for each in targets], numels)
        self._table = torch.zeros(4, self.count, dtype=torch.int64)
        """The first program of each piece, its starts in units, its elements."""
        self._table[0] = self.programs  # behind the pieces: no program is so far
        self._table[:, : len(spans)] = torch.tensor(rows)
        self._there: dict[torch.device, torch.Tensor] = {}

    def table_on(self, device: torch.device) -> torch.Tensor:
        """Return the table on the device. It is copied there once: such a copy waits for the GPU."""
        if device not in self._there:
            self._there[device] = self._table.to(device)
        return self._there[device]


def lay_out(pieces: Pieces, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `pieces` of `source` to `target`, both flat and of one data type, on the current stream, without waiting."""
    dtype = COPIED_AS[target.itemsize]
    source, target = source.view(dtype), target.view(dtype)
    launch(
        _COMPILED,
        _lay_out_kernel,
        (target.device, dtype) if aligned((source, target)) else None,
        pieces.programs,
        (source, target, pieces.table_on(target.device)),
        COUNT=pieces.count,
        UNIT=pieces.unit,
        BLOCK=BLOCK,
        CHUNK=CHUNK,
        num_warps=NUM_WARPS,
    )
