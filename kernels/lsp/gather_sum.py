"""Products of a matrix with a sparse projector, without atomic additions: each element adds up the rows that it needs.

The results are stored transposed, so that the next product, with the other projector, reads whole rows again:

    compress     T = GᵀP [n, d1], S = TᵀQ [d1, d2] = PᵀGQ
    decompress   E = (Q Dᵀ)ᵀ [d1, n] = DQᵀ. `ds_slide.kernels.lsp.apply` then computes PE.

Reading G and writing S bound the compression. Each row of G is read r times. Programs of the same columns run side by
side and read the rows in the same order, so the L2 cache should have a row after its first read. T (fp32) is written,
and read r times. Counted for the seven matrices of a Qwen2.5-1.5B block, bf16, d = min(m, n) / 2, r = 4: 106 MB are the
bound (22 us at 4.8 TB/s), 154 to 202 MB go through memory, 566 MB come from L2. For 3B: 175 MB (37 us), 256 to 337 and
940.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_slide.kernels.launch import Compiled, aligned, launch
from ds_slide.kernels.lsp.sparse import Sparse, expanded_tile, nothing
from ds_slide.kernels.lsp.table import ELEMENTS, LISTS

# Rows with loads under way at once.
UNROLL = 4
_COMPILED: Compiled = {}


@triton.jit
def listed(starts, columns, d):
    """Return the first entry and the number of entries of each of `columns`, in a projector of `d` columns."""
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
    """Return a tile of XᵀP for X [rows, width], transposed, [A, B] fp32. The columns of P have `count` entries from
    `start` on (both [A]), and the columns of X are `elements` [1, B]. Terms are added by ascending row."""
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
            # tl.where chooses, because adding zero would turn -0.0 into 0.0.
            total = tl.where(mask, total + value[:, None] * row.to(tl.float32), total)
        step += UNROLL
    return total


@triton.jit
def product_tile(program, d, LISTS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Return one program's columns [LISTS] of a projector of `d` columns, and [1, ELEMENTS] of a matrix."""
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
    """Write out [width, d] = XᵀP for X [rows, width]."""
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
    """Write out [width, lists] = (PX)ᵀ for X [d, width]: a tile of LISTS rows of P and ELEMENTS columns of X."""
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
    """Return XᵀP, [k, d] fp32, for X [rows, k], bf16, fp16 or fp32, contiguous, without waiting.

    The result is written to `out` if given, or added to it with `accumulate`.
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
    """Return (PX)ᵀ, [k, rows] fp32, for X [d, k], fp32 or bf16, contiguous, without waiting."""
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
    """Do `ds_slide.compression.lsp.projection.compress` with checked arguments."""
    project(project(gradient, left), right, out, accumulate=accumulate)
