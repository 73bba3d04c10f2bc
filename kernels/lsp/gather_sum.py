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

from ds_slide.kernels.lsp.sparse import Sparse, expanded_tile, nothing

# A tile of the result: 64 elements of a row of G are a cache line in bf16, 32 of a row of the result are one in fp32.
LISTS, WIDTH = 32, 64
# Rows whose loads are under way at once.
UNROLL = 4


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
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """out [width, d] = XᵀP of X [rows, width]: a tile of LISTS columns of P and WIDTH columns of X."""
    blocks = tl.cdiv(d, LISTS)
    columns = (tl.program_id(0) % blocks) * LISTS + tl.arange(0, LISTS)
    elements = (tl.program_id(0) // blocks) * WIDTH + tl.arange(0, WIDTH)[None, :]
    start = tl.load(starts + columns, mask=columns < d, other=0)
    count = tl.load(starts + columns + 1, mask=columns < d, other=0) - start
    longest = tl.max(count, axis=0)
    total = nothing(LISTS, WIDTH)
    step = 0
    while step < longest:  # the interpreter cannot take a range of a run-time number
        for ahead in tl.static_range(UNROLL):
            listed = step + ahead < count
            entry = tl.load(entries + start + step + ahead, mask=listed, other=0)
            value = tl.load(values + entry, mask=listed, other=0.0)
            mask = listed[:, None] & (elements < width)
            row = tl.load(matrix + (entry // R).to(tl.int64)[:, None] * width + elements, mask=mask, other=0.0)
            # Chosen, not added as zero: -0.0 + 0.0 would be 0.0.
            total = tl.where(mask, total + value[:, None] * row.to(tl.float32), total)
        step += UNROLL
    targets = out + elements.to(tl.int64) * d + columns[:, None]
    mask = (columns < d)[:, None] & (elements < width)
    if ACCUMULATE:
        total = tl.load(targets, mask=mask, other=0.0) + total
    tl.store(targets, total, mask=mask)


@triton.jit
def _expand_kernel(
    matrix, indices, values, out, width, lists, R: tl.constexpr, LISTS: tl.constexpr, WIDTH: tl.constexpr
):
    """out [width, lists] = (PX)ᵀ of X [d, width]: a tile of LISTS rows of P and WIDTH columns of X."""
    blocks = tl.cdiv(lists, LISTS)
    rows = (tl.program_id(0) % blocks) * LISTS + tl.arange(0, LISTS)
    elements = (tl.program_id(0) // blocks) * WIDTH + tl.arange(0, WIDTH)
    total = expanded_tile(indices, values, matrix, rows, elements, lists, width, R)
    mask = (rows < lists)[:, None] & (elements < width)[None, :]
    tl.store(out + elements.to(tl.int64)[None, :] * lists + rows[:, None], total, mask=mask)


def project(
    matrix: torch.Tensor, projector: Sparse, out: torch.Tensor | None = None, *, accumulate: bool = False
) -> torch.Tensor:
    """XᵀP, [k, d] fp32, of X [rows, k], bf16, fp16 or fp32, contiguous, without waiting.

    It is written to `out` where that is given, added to it with `accumulate`.
    """
    width, d, columns = matrix.shape[1], projector.d, projector.columns
    if out is None:
        out = torch.empty(width, d, dtype=torch.float32, device=matrix.device)
    _project_kernel[(triton.cdiv(d, LISTS) * triton.cdiv(width, WIDTH),)](
        matrix,
        projector.values,
        columns.starts,
        columns.entries,
        out,
        width,
        d,
        R=projector.r,
        ACCUMULATE=accumulate,
        LISTS=LISTS,
        WIDTH=WIDTH,
        UNROLL=UNROLL,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def expand(matrix: torch.Tensor, projector: Sparse) -> torch.Tensor:
    """(PX)ᵀ, [k, rows] fp32, of X [d, k], fp32 or bf16, contiguous, without waiting."""
    width, lists = matrix.shape[1], projector.rows
    out = torch.empty(width, lists, dtype=torch.float32, device=matrix.device)
    _expand_kernel[(triton.cdiv(lists, LISTS) * triton.cdiv(width, WIDTH),)](
        matrix,
        projector.indices,
        projector.values,
        out,
        width,
        lists,
        R=projector.r,
        LISTS=LISTS,
        WIDTH=WIDTH,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def compress_(gradient: torch.Tensor, left: Sparse, right: Sparse, out: torch.Tensor, accumulate: bool) -> None:
    """`ds_slide.compression.lsp.projection.compress` of checked arguments."""
    project(project(gradient, left), right, out, accumulate=accumulate)
