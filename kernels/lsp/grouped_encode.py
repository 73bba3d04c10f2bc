"""The gradients of a group of matrices, compressed in four launches: their square sums in two, GᵀP, and PᵀGQ.

One matrix at a time, a block's seven take about 60 launches, and host and GPU wait for them. Each matrix gets the bits
of `gather_sum` and of `ds_slide.kernels.offload.square_sum`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ds_slide.kernels.constants import SEGMENT
from ds_slide.kernels.launch import aligned, launch
from ds_slide.kernels.lsp.gather_sum import UNROLL, gathered_tile, listed, product_tile
from ds_slide.kernels.lsp.group import (
    ALIGNMENT,
    COLUMNS_BEFORE,
    PRODUCT,
    ROWS_BEFORE,
    START,
    STARTS_BEFORE,
    Group,
    entries_before,
    field,
    member,
    place,
    sides,
)
from ds_slide.kernels.lsp.table import ELEMENTS, LISTS, PARTIALS, WIDTH
from ds_slide.kernels.offload.gradient_pack import widened
from ds_slide.kernels.offload.square_sum import BLOCK, COMBINE_BLOCK, NUM_WARPS, combined, segment_square_sum

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _chosen(gradients, index, WIDTH: tl.constexpr):
    gradient = gradients[0]
    for later in tl.static_range(1, WIDTH):
        gradient = tl.where(index == later, gradients[later], gradient)
    return gradient


@triton.jit
def _is_given(given, index):
    return ((given >> index) & 1) != 0


@triton.jit(do_not_specialize=["given"])
def _squares_kernel(
    gradients,
    given,
    firsts,
    fields,
    partial,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write partial [programs] fp64: square sums of the segments of the gradients that are `given`."""
    index, program = member(firsts, WIDTH)
    rows, columns, _ = sides(fields, index, UNIT, WIDTH)
    numel = rows.to(tl.int64) * columns
    if _is_given(given, index) & (program.to(tl.int64) * SEGMENT < numel):
        total = segment_square_sum(_chosen(gradients, index, WIDTH), program, numel, SEGMENT, BLOCK)
        tl.store(partial + tl.program_id(0), total)


@triton.jit(do_not_specialize=["given", "count"])
def _total_kernel(
    partial,
    given,
    firsts,
    fields,
    total,
    count,
    ADD: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTIALS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sum of the square sums of the first `count` gradients to total [] fp64. With ADD add to its value."""
    summed = tl.load(total) if ADD else tl.full((), 0.0, dtype=tl.float64)
    index = 0
    while index < count:
        rows, columns, _ = sides(fields, index, UNIT, WIDTH)
        segments = tl.cdiv(rows.to(tl.int64) * columns, SEGMENT).to(tl.int32)
        first = tl.load(firsts + index) // PARTIALS * PARTIALS  # unchanged; the compiler sees a multiple
        summed += combined(partial + first, tl.where(_is_given(given, index), segments, 0), BLOCK)
        index += 1
    tl.store(total, summed)


@triton.jit(do_not_specialize=["given"])
def _left_kernel(
    gradients,
    given,
    firsts,
    fields,
    values,
    starts,
    entries,
    products,
    R: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    LISTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Write GᵀP [columns, d] of each gradient that is `given` at its place of `products`."""
    index, program = member(firsts, WIDTH)
    _, width, d = sides(fields, index, UNIT, WIDTH)
    columns, elements = product_tile(program, d, LISTS, ELEMENTS)
    before = entries_before(fields, index, ROWS_BEFORE, R, WIDTH)
    start, count = listed(starts + field(fields, index, STARTS_BEFORE, WIDTH), columns, d)
    there = _is_given(given, index)
    total = gathered_tile(
        _chosen(gradients, index, WIDTH),
        values + before,
        entries + before,
        start,
        tl.where(there, count, 0),
        elements,
        width,
        R,
        UNROLL,
    )
    targets = products + place(fields, index, PRODUCT, WIDTH) + elements.to(tl.int64) * d + columns[:, None]
    tl.store(targets, total, mask=(columns < d)[:, None] & (elements < width) & there)


@triton.jit(do_not_specialize=["given"])
def _right_kernel(
    products,
    given,
    firsts,
    fields,
    values,
    starts,
    entries,
    encoded,
    R: tl.constexpr,
    DTYPE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    LISTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Round S = PᵀGQ [d, d] of each gradient to DTYPE, and add it to its place of `encoded` or to zero there."""
    index, program = member(firsts, WIDTH)
    _, _, d = sides(fields, index, UNIT, WIDTH)
    columns, elements = product_tile(program, d, LISTS, ELEMENTS)
    before = entries_before(fields, index, COLUMNS_BEFORE, R, WIDTH)
    start, count = listed(starts + field(fields, index, STARTS_BEFORE, WIDTH), columns, d)
    total = gathered_tile(
        products + place(fields, index, PRODUCT, WIDTH),
        values + before,
        entries + before,
        start,
        tl.where(_is_given(given, index), count, 0),  # without a gradient: -0.0, which changes nothing
        elements,
        d,
        R,
        UNROLL,
    )
    target = encoded + place(fields, index, START, WIDTH)
    places = elements.to(tl.int64) * d + columns[:, None]
    mask = (columns < d)[:, None] & (elements < d)
    if ACCUMULATE:
        old = tl.load(target + places, mask=mask, other=0.0).to(tl.float32)
    else:
        old = tl.zeros((LISTS, ELEMENTS), dtype=tl.float32)
        if program == 0:  # the gap behind it
            end = d.to(tl.int64) * d
            gap = end + tl.arange(0, ALIGNMENT)
            zeros = tl.zeros((ALIGNMENT,), dtype=encoded.dtype.element_ty)
            tl.store(target + gap, zeros, mask=gap < tl.cdiv(end, ALIGNMENT) * ALIGNMENT)
    new = old + widened(total.to(DTYPE), encoded.dtype.element_ty)
    tl.store(target + places, new.to(encoded.dtype.element_ty), mask=mask)


def encode_(
    group: Group,
    gradients: Sequence[torch.Tensor | None],
    encoded: torch.Tensor,
    dtype: torch.dtype,
    workspace: torch.Tensor,
    total: torch.Tensor,
    *,
    accumulate: bool,
    adds: bool,
) -> None:
    """Compress the gradients of a group into their places of `encoded`, and write their square sum to `total`. It does
    not wait and does not allocate.

    gradients: one for each matrix of the group, in its shape, bf16, fp16 or fp32, contiguous, or None.
    encoded: flat, bf16, fp16 or fp32. Each PᵀGQ is rounded to `dtype`. Then it is written, with zeros behind it and for
        a missing gradient. With `accumulate` it is added in fp32 and rounded to the data type of `encoded`.
    workspace: bytes, for the partial square sums (fp64) and products (fp32) of the table's members.
    total: [] fp64. With `adds` the square sum is added to it.
    """
    table, left, right = group.table, group.left, group.right
    end = torch.float64.itemsize * table.squares.programs
    partial, products = workspace[:end].view(torch.float64), workspace[end:].view(torch.float32)
    are_aligned = aligned([encoded, partial, products, total, *(each for each in gradients if each is not None)])
    common = {"UNIT": table.unit, "WIDTH": WIDTH}
    tile = {"LISTS": LISTS, "ELEMENTS": ELEMENTS, "UNROLL": UNROLL, "num_warps": 4, "enable_fp_fusion": False}
    given = 0
    for its_dtype in dict.fromkeys(each.dtype for each in gradients if each is not None):
        pointers, these = _of_dtype(gradients, its_dtype)
        given |= these
        launch(
            table.compiled,
            _squares_kernel,
            (its_dtype,) if are_aligned else None,
            table.squares.programs,
            (pointers, these, table.squares.firsts, table.fields, partial),
            SEGMENT=SEGMENT,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            **common,
        )
        launch(
            table.compiled,
            _left_kernel,
            (its_dtype,) if are_aligned else None,
            table.left.programs,
            (pointers, these, table.left.firsts, table.fields, left.values, left.starts, left.entries, products),
            R=left.r,
            **common,
            **tile,
        )
    launch(
        table.compiled,
        _right_kernel,
        (encoded.dtype,) if are_aligned else None,
        table.right.programs,
        (products, given, table.right.firsts, table.fields, right.values, right.starts, right.entries, encoded),
        R=right.r,
        DTYPE=_DTYPES[dtype],
        ACCUMULATE=accumulate,
        **common,
        **tile,
    )
    launch(
        table.compiled,
        _total_kernel,
        () if are_aligned else None,
        1,
        (partial, given, table.squares.firsts, table.fields, total, table.count),
        ADD=adds,
        PARTIALS=PARTIALS,
        SEGMENT=SEGMENT,
        BLOCK=COMBINE_BLOCK,
        num_warps=NUM_WARPS,
        **common,
    )


def _of_dtype(gradients: Sequence[torch.Tensor | None], dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], int]:
    """Return WIDTH tensors for a launch over the gradients of one data type, and a bit for each one to read. The other
    tensors are not read."""
    own = [each if each is not None and each.dtype == dtype else None for each in gradients]
    unread = next(each for each in own if each is not None)
    pointers = [unread if each is None else each for each in own]
    bits = sum(1 << number for number, each in enumerate(own) if each is not None)
    return (*pointers, *[unread] * (WIDTH - len(pointers))), bits
