"""The changes of a group of matrices, applied to their weights in three launches: Dᵀ, E = DQᵀ, and W = decay * W + PE.

Each matrix gets the bits of `ds_slide.kernels.lsp.apply`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ds_slide.kernels.launch import aligned, launch
from ds_slide.kernels.lsp.apply import apply_tile, signed
from ds_slide.kernels.lsp.gather_sum import expand_tile
from ds_slide.kernels.lsp.group import (
    COLUMNS_BEFORE,
    PRODUCT,
    ROWS_BEFORE,
    SLOT_OFFSET,
    START,
    UPPER_HALF,
    Group,
    entries_before,
    field,
    member,
    place,
    sides,
)
from ds_slide.kernels.lsp.table import COLUMNS, ELEMENTS, LISTS, ROWS, SIDE, WIDTH


@triton.jit
def _transpose_kernel(change, transposed, firsts, fields, UNIT: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr):
    """Write Dᵀ [d, d] of each matrix. The next launch gathers its rows."""
    index, program = member(firsts, WIDTH)
    _, _, d = sides(fields, index, UNIT, WIDTH)
    start = place(fields, index, START, WIDTH)
    blocks = tl.cdiv(d, SIDE)
    rows = (program % blocks) * SIDE + tl.arange(0, SIDE)
    columns = (program // blocks) * SIDE + tl.arange(0, SIDE)
    sources = rows.to(tl.int64)[:, None] * d + columns[None, :]
    tile = tl.load(change + start + sources, mask=(rows < d)[:, None] & (columns < d)[None, :], other=0.0)
    targets = columns.to(tl.int64)[:, None] * d + rows[None, :]
    tl.store(transposed + start + targets, tl.trans(tile), mask=(columns < d)[:, None] & (rows < d)[None, :])


@triton.jit
def _expand_kernel(
    transposed,
    firsts,
    fields,
    indices,
    values,
    products,
    R: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    LISTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Write E = DQᵀ [d, columns] of each matrix at its place of `products`."""
    index, program = member(firsts, WIDTH)
    _, lists, d = sides(fields, index, UNIT, WIDTH)
    before = entries_before(fields, index, COLUMNS_BEFORE, R, WIDTH)
    expand_tile(
        program,
        transposed + place(fields, index, START, WIDTH),
        indices + before,
        values + before,
        products + place(fields, index, PRODUCT, WIDTH),
        d,
        lists,
        R,
        LISTS,
        ELEMENTS,
    )


@triton.jit
def _keys(low, high, upper_half):
    """Return `ds_slide.optim.rounding.keys` for the step's key, given in halves, and a matrix."""
    z = (high.to(tl.uint32).to(tl.uint64) << 32) + low.to(tl.uint32).to(tl.uint64) + upper_half.to(tl.uint64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return z.to(tl.uint32), (z >> 32).to(tl.uint32)


@triton.jit(do_not_specialize=["step_low", "step_high"])
def _apply_kernel(
    weight,
    remainder,
    decays,
    step_low,
    step_high,
    products,
    firsts,
    fields,
    indices,
    values,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    index, program = member(firsts, WIDTH)
    decay = decays[0]
    for later in tl.static_range(1, WIDTH):
        decay = tl.where(index == later, decays[later], decay)
    rows, columns, _ = sides(fields, index, UNIT, WIDTH)
    start = place(fields, index, SLOT_OFFSET, WIDTH)
    before = entries_before(fields, index, ROWS_BEFORE, R, WIDTH)
    low_key, high_key = _keys(step_low, step_high, field(fields, index, UPPER_HALF, WIDTH))
    apply_tile(
        program,
        weight + start,
        remainder + start,
        products + place(fields, index, PRODUCT, WIDTH),
        indices + before,
        values + before,
        rows,
        columns,
        decay,
        1.0,
        low_key,
        high_key,
        R,
        SPLIT,
        ROWS,
        COLUMNS,
    )


def apply_(
    group: Group,
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    change: torch.Tensor,
    decays: Sequence[float],
    step_key: int | None,
    transposed: torch.Tensor,
    products: torch.Tensor,
) -> None:
    """Do W = decay * W + PDQᵀ for each matrix of a group, in place, without waiting and without allocations.

    weight: flat, in slot layout: bf16 with `remainder`, its low 16 bits (int16), or fp32, or bf16 with stochastic
    rounding by `step_key` (`ds_slide.optim.rounding`). change: flat, fp32, every D [d, d] at its start. decays: one for
    each matrix, exact in fp32. transposed (as large as `change`) and products (with the sizes of the table's members):
    fp32, workspace.
    """
    table, left, right = group.table, group.left, group.right
    bits = weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight
    lower = bits if remainder is None else remainder
    are_aligned = aligned([bits, lower, change, transposed, products])
    key = step_key or 0
    common = {"UNIT": table.unit, "WIDTH": WIDTH, "num_warps": 4, "enable_fp_fusion": False}
    launch(
        table.compiled,
        _transpose_kernel,
        () if are_aligned else None,
        table.transpose.programs,
        (change, transposed, table.transpose.firsts, table.fields),
        SIDE=SIDE,
        **common,
    )
    launch(
        table.compiled,
        _expand_kernel,
        () if are_aligned else None,
        table.expand.programs,
        (transposed, table.expand.firsts, table.fields, right.indices, right.values, products),
        R=right.r,
        LISTS=LISTS,
        ELEMENTS=ELEMENTS,
        **common,
    )
    launch(
        table.compiled,
        _apply_kernel,
        (bits.dtype,) if are_aligned else None,
        table.apply.programs,
        (
            bits,
            lower,
            (*decays, *[1.0] * (WIDTH - len(decays))),
            signed(key & 0xFFFFFFFF),
            signed(key >> 32),
            products,
            table.apply.firsts,
            table.fields,
            left.indices,
            left.values,
        ),
        R=left.r,
        SPLIT=remainder is not None,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        **common,
    )
