"""The kernels' view of a projector (`ds_slide.compression.lsp.projector.Projector`), and a tile of its product."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl


class Columns(Protocol):
    @property
    def starts(self) -> torch.Tensor: ...
    @property
    def entries(self) -> torch.Tensor: ...


class Sparse(Protocol):
    """P [rows, d] by row (`indices` and `values`, [rows, r]) and by column (places in these)."""

    @property
    def indices(self) -> torch.Tensor: ...
    @property
    def values(self) -> torch.Tensor: ...
    @property
    def d(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def r(self) -> int: ...
    @property
    def columns(self) -> Columns: ...


@triton.jit
def nothing(A: tl.constexpr, B: tl.constexpr):
    """Return [A, B] of -0.0, which changes no number when it is added, not even -0.0.

    It is made from its bits, because Triton takes a constant that equals 0 for 0.0.
    """
    return tl.full((A, B), -0x80000000, dtype=tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def expanded_tile(indices, values, matrix, rows, columns, count, width, R: tl.constexpr):
    """Return PX at `rows` [A] and `columns` [B], [A, B] fp32, for P [count, d] and X [d, width]. Terms are added by
    ascending column."""
    listed = rows < count
    mask = listed[:, None] & (columns < width)[None, :]
    total = nothing(rows.shape[0], columns.shape[0])
    for place in tl.static_range(R):
        source = tl.load(indices + rows * R + place, mask=listed, other=0).to(tl.int64) * width
        value = tl.load(values + rows * R + place, mask=listed, other=0.0)
        row = tl.load(matrix + source[:, None] + columns[None, :], mask=mask, other=0.0)
        total += value[:, None] * row.to(tl.float32)
    return total
