"""Products of a matrix with a sparse projector, without atomic additions: each element adds up the rows that it needs.

The results are stored transposed, so that the next product, with the other projector, reads whole rows again:

    compress     T = GᵀP [n, d1], S = TᵀQ [d1, d2] = PᵀGQ
    decompress   E = (Q Dᵀ)ᵀ [d1, n] = DQᵀ, of which `ds_slide.kernels.lsp.apply` takes PE

Compressing is bound by reading G and writing S. Each row of G is read r times, but programs of the same columns run
side by side and go through the rows in the same order, so that the L2 cache should have all but the first; T (fp32) is
written, and read r times. By count, of the seven matrices of a Qwen2.5-1.5B block, bf16, d = min(m, n) / 2, r = 4: 106
MB are the bound (22 us at 4.8 TB/s), 154 to 202 MB go through memory, 566 MB come out of L2. Of 3B: 175 MB (37 us), 256
to 337 and 940.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_slide.kernels.launch import Compiled, aligned, launch
from ds_slide.kernels.lsp.sparse import Sparse, expanded_tile, nothing
from ds_slide.kernels.lsp.table import ELEMENTS, LISTS

# Rows whose loads are under way at once.
UNROLL = 4
_COMPILED: Compiled = {}


@triton.jit
def listed(starts, columns, d):
    """Of columns of a projector of `d` columns: where the entries of each start, and how many there are."""
    start = tl.load(starts + columns, mask=columns < d, other=0)
    return start, tl.load(starts + columns + 1, mask=columns < d, other=0) - start


@triton.jit
def gathered_tile(
    matrix,
    values,
    entries,
    start,
    count,
    elements,
    width,
    R: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """XᵀP of X [rows, width], transposed, [A, B] fp32, at the columns of P with the entries from `start` on, `count` of
    them (both [A]), and the columns `elements` [1, B] of X: terms by ascending row."""
    longest = tl.max(count, axis=0)
    total = nothing(start.shape[0], elements.shape[1])
    step = 0
    while step < longest:  # the interpreter cannot take a range of a run-time number
        for ahead in tl.static_range(UNROLL):
            there = step + ahead < count
            entry = tl.load(entries + start + step + ahead, mask=there, other=0)
            value = tl.load(values + entry, mask=there, other=0.0)
            mask = there[:, None] & (elements < width)
            row = tl.load(matrix + (entry // R).to(tl.int64)[:, None] * width + elements, mask=mask, other=0.0)
            # Chosen, not added as zero: -0.0 + 0.0 would be 0.0.
            total = tl.where(mask, total + value[:, None] * row.to(tl.float32), total)
        step += UNROLL
    return total


@triton.jit
def product_tile(program, d, LISTS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Columns [LISTS] of a projector of `d` columns, and [1, ELEMENTS] of a matrix, of one program of their product."""
    blocks = tl.cdiv(d, LISTS)
    columns = (program % blocks) * LISTS + tl.arange(0, LISTS)
    return columns, (program // blocks) * ELEMENTS + tl.arange(0, ELEMENTS)[None, :]


@triton.jit
def _project_kernel(
    matrix,
    values,
    starts,
    entries,
    out,
    width,
    d,
    R: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    LISTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """out [width, d] = XᵀP of X [rows, width]."""
    columns, elements = product_tile(tl.program_id(0), d, LISTS, ELEMENTS)
    start, count = listed(starts, columns, d)
    total = gathered_tile(matrix, values, entries, start, count, elements, width, R, UNROLL)
    targets = out + elements.to(tl.int64) * d + columns[:, None]
    mask = (columns < d)[:, None] & (elements < width)
    if ACCUMULATE:
        total = tl.load(targets, mask=mask, other=0.0) + total
    tl.store(targets, total, mask=mask)


@triton.jit
def expand_tile(
    program,
    matrix,
    indices,
    values,
    out,
    width,
    lists,
    R: tl.constexpr,
    LISTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """out [width, lists] = (PX)ᵀ of X [d, width]: a tile of LISTS rows of P and ELEMENTS columns of X."""
    blocks = tl.cdiv(lists, LISTS)
    rows = (program % blocks) * LISTS + tl.arange(0, LISTS)
    elements = (program // blocks) * ELEMENTS + tl.arange(0, ELEMENTS)
    total = expanded_tile(indices, values, matrix, rows, elements, lists, width, R)
    mask = (rows < lists)[:, None] & (elements < width)[None, :]
    tl.store(out + elements.to(tl.int64)[None, :] * lists + rows[:, None], total, mask=mask)


@triton.jit
def _expand_kernel(
    matrix, indices, values, out, width, lists, R: tl.constexpr, LISTS: tl.constexpr, ELEMENTS: tl.constexpr
):
    expand_tile(tl.program_id(0), matrix, indices, values, out, width, lists, R, LISTS, ELEMENTS)


def project(
    matrix: torch.Tensor, projector: Sparse, out: torch.Tensor | None = None, *, accumulate: bool = False
) -> torch.Tensor:
    """XᵀP, [k, d] fp32, of X [rows, k], bf16, fp16 or fp32, contiguous, without waiting.

    It is written to `out` where that is given, added to it with `accumulate`.
    """
    width, d, columns = matrix.shape[1], projector.d, projector.columns
    if out is None:
        out = torch.empty(width, d, dtype=torch.float32, device=matrix.device)
    arguments = (matrix, projector.values, columns.starts, columns.entries, out)
    launch(
        _COMPILED,
        _project_kernel,
        (matrix.device, matrix.dtype, width, d) if aligned(arguments) else None,
        triton.cdiv(d, LISTS) * triton.cdiv(width, ELEMENTS),
        (*arguments, width, d),
        R=projector.r,
        ACCUMULATE=accumulate,
        LISTS=LISTS,
        ELEMENTS=ELEMENTS,
        UNROLL=UNROLL,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def expand(matrix: torch.Tensor, projector: Sparse) -> torch.Tensor:
    """(PX)ᵀ, [k, rows] fp32, of X [d, k], fp32 or bf16, contiguous, without waiting."""
    width, lists = matrix.shape[1], projector.rows
    out = torch.empty(width, lists, dtype=torch.float32, device=matrix.device)
    _expand_kernel[(triton.cdiv(lists, LISTS) * triton.cdiv(width, ELEMENTS),)](
        matrix,
        projector.indices,
        projector.values,
        out,
        width,
        lists,
        R=projector.r,
        LISTS=LISTS,
        ELEMENTS=ELEMENTS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def compress_(gradient: torch.Tensor, left: Sparse, right: Sparse, out: torch.Tensor, accumulate: bool) -> None:
    """`ds_slide.compression.lsp.projection.compress` of checked arguments."""
    project(project(gradient, left), right, out, accumulate=accumulate)
