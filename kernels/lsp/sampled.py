"""The slope of a fit at the non-zeros of a projector: r elements of each row of a product, instead of all d.

A row of X and r rows of F give r sums: 4 * k * (r + 1) bytes. The bytes of F [d, k] come from the L2 cache. The whole
product would take d / r times the operations, and memory for [rows, d].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_slide.kernels.launch import Compiled, aligned, launch
from ds_slide.kernels.lsp.sparse import Sparse

ROWS, BLOCK = 8, 128
_COMPILED: Compiled = {}


@triton.jit
def _sampled_kernel(
    indices,
    values,
    own,
    matrix,
    factor,
    out,
    count,
    d,
    width,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write out [count, R] = (P own + X Fᵀ) at the non-zeros of P: `ds_slide.compression.lsp.projection.sampled`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    listed = rows < count
    for place in tl.static_range(R):
        column = tl.load(indices + rows * R + place, mask=listed, other=0).to(tl.int64)
        products = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        step = 0
        while step < width:  # the interpreter cannot take a range of a run-time number
            steps = step + tl.arange(0, BLOCK)
            mask = listed[:, None] & (steps < width)[None, :]
            x = tl.load(matrix + rows.to(tl.int64)[:, None] * width + steps[None, :], mask=mask, other=0.0)
            products += x * tl.load(factor + column[:, None] * width + steps[None, :], mask=mask, other=0.0)
            step += BLOCK
        total = tl.sum(products, axis=1)
        for other in tl.static_range(R):
            its_row = tl.load(indices + rows * R + other, mask=listed, other=0).to(tl.int64) * d
            value = tl.load(values + rows * R + other, mask=listed, other=0.0)
            total += value * tl.load(own + its_row + column % d, mask=listed, other=0.0)
        tl.store(out + rows * R + place, total, mask=listed)


def sampled(projector: Sparse, own: torch.Tensor, matrix: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Do `ds_slide.compression.lsp.projection.sampled` with tensors on a GPU."""
    rows, width = matrix.shape
    d = own.shape[1]
    out = torch.empty(rows, projector.r, dtype=torch.float32, device=matrix.device)
    arguments = (projector.indices, projector.values, own, matrix, factor, out)
    launch(
        _COMPILED,
        _sampled_kernel,
        (matrix.device, rows, d, width) if aligned(arguments) else None,
        triton.cdiv(rows, ROWS),
        (*arguments, rows, d, width),
        R=projector.r,
        ROWS=ROWS,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
