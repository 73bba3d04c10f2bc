"""Backward kernels of norms over rows in registers, in the tiles of `rows`.

The weight's gradient is summed in fp32. A program walks a span of rows and keeps its sum in registers, and a small
kernel adds the programs' sums. Launches depend only on the shape, so the bits do not depend on the device's size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_slide.kernels.norm.rows import (
    BACKWARD_EVICTION,
    load_rows,
    load_weight,
    load_weight_tile,
    normalise,
    present,
    with_offset,
)


@triton.jit
def _add_pairs(one, two, other_one, other_two):
    return one + other_one, two + other_two


@triton.jit(do_not_specialize=["rows", "walk"])
def backward_kernel(
    dy,
    x,
    dtotal,
    weight,
    mean,
    rstd,
    dx,
    weight_sums,
    bias_sums,
    rows,
    walk,
    dy_strides,
    x_strides,
    dtotal_strides,
    offset,
    ROUND: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
    HELD: tl.constexpr,
):
    """Walk `walk` rows in each program. With AHEAD the next rows are loaded while the present ones are reduced.

    With HELD the weight stays in registers. Without it the weight is read from the cache twice for every row.
    """
    column = tl.arange(0, WIDTH)[None, :]
    lane = tl.arange(0, TILE_ROWS)[:, None]
    start = tl.program_id(0) * walk
    end = tl.minimum(start + walk, rows)
    row = start + lane
    if mean is None:
        row_mean = None
    if AHEAD:
        gradient = load_rows(dy, dy_strides, row, end, column, COLUMNS, TILES, WIDTH, BACKWARD_EVICTION)
        value = load_rows(x, x_strides, row, end, column, COLUMNS, TILES, WIDTH, BACKWARD_EVICTION)
        row_rstd = tl.load(rstd + row, mask=row < end, other=0.0)
        if mean is not None:
            row_mean = tl.load(mean + row, mask=row < end, other=0.0)
    if weight is not None and HELD:
        scale = load_weight(weight, column, COLUMNS, TILES, WIDTH)
    zeros = ()
    for _ in tl.static_range(TILES):
        zeros += (tl.zeros((TILE_ROWS, WIDTH), dtype=tl.float32),)
    weight_sum = zeros
    bias_sum = zeros
    while start < end:
        row = start + lane
        if AHEAD:
            ahead = row + TILE_ROWS
            gradient_ahead = load_rows(dy, dy_strides, ahead, end, column, COLUMNS, TILES, WIDTH, BACKWARD_EVICTION)
            value_ahead = load_rows(x, x_strides, ahead, end, column, COLUMNS, TILES, WIDTH, BACKWARD_EVICTION)
            rstd_ahead = tl.load(rstd + ahead, mask=ahead < end, other=0.0)
            if mean is not None:
                mean_ahead = tl.load(mean + ahead, mask=ahead < end, other=0.0)
        else:
            gradient = load_rows(dy, dy_strides, row, end, column, COLUMNS, TILES, WIDTH, BACKWARD_EVICTION)
            value = load_rows(x, x_strides, row, end, column, COLUMNS, TILES, WIDTH, BACKWARD_EVICTION)
            row_rstd = tl.load(rstd + row, mask=row < end, other=0.0)
            if mean is not None:
                row_mean = tl.load(mean + row, mask=row < end, other=0.0)
        if dtotal is not None:
            straight = load_rows(dtotal, dtotal_strides, row, end, column, COLUMNS, TILES, WIDTH, BACKWARD_EVICTION)
        products = tl.zeros((TILE_ROWS, WIDTH), dtype=tl.float32)
        sums = tl.zeros((TILE_ROWS, WIDTH), dtype=tl.float32)
        weight_sum_next = ()
        bias_sum_next = ()
        for index in tl.static_range(TILES):
            normalised = normalise(value[index], row_mean, row_rstd, column, index, COLUMNS, WIDTH)
            scaled = gradient[index].to(tl.float32)
            if bias_sums is not None:
                bias_sum_next += (bias_sum[index] + scaled,)
            if weight_sums is not None:
                rounded = normalised
                if ROUND:  # the forward multiplied the weight with rounded values
                    rounded = normalised.to(x.dtype.element_ty).to(tl.float32)
                weight_sum_next += (weight_sum[index] + scaled * rounded,)
            if weight is not None:
                if HELD:
                    factor = scale[index]
                else:
                    factor = load_weight_tile(weight, column, index, COLUMNS, WIDTH)
                scaled *= with_offset(factor, offset)
            products += scaled * normalised
            sums += scaled
        if weight_sums is not None:
            weight_sum = weight_sum_next
        if bias_sums is not None:
            bias_sum = bias_sum_next
        if mean is not None:  # one reduction for both, because each reduction needs barriers
            inner_product, row_sum = tl.reduce((products, sums), 1, _add_pairs, keep_dims=True)
            row_sum *= row_rstd / COLUMNS
        else:
            inner_product = tl.sum(products, axis=1, keep_dims=True)
        inner_product *= row_rstd / COLUMNS
        place = row.to(tl.int64) * COLUMNS + column
        for index in tl.static_range(TILES):
            scaled = gradient[index].to(tl.float32)
            if weight is not None:
                if HELD:
                    factor = scale[index]
                else:
                    factor = load_weight_tile(weight, column, index, COLUMNS, WIDTH)
                scaled *= with_offset(factor, offset)
            normalised = normalise(value[index], row_mean, row_rstd, column, index, COLUMNS, WIDTH)
            result = scaled * row_rstd - normalised * inner_product
            if mean is not None:
                result -= row_sum
            if dtotal is not None:
                result += straight[index].to(tl.float32)
            mask = present(row < end, column, index, COLUMNS, WIDTH)
            tl.store(dx + place + index * WIDTH, result.to(dx.dtype.element_ty), mask=mask)
        if AHEAD:
            gradient = gradient_ahead
            value = value_ahead
            row_rstd = rstd_ahead
            if mean is not None:
                row_mean = mean_ahead
        start += TILE_ROWS
    lanes = tl.arange(0, WIDTH)
    first = tl.program_id(0).to(tl.int64) * COLUMNS
    for index in tl.static_range(TILES):
        place = index * WIDTH + lanes
        if weight_sums is not None:
            tl.store(weight_sums + first + place, tl.sum(weight_sum[index], axis=0), mask=place < COLUMNS)
        if bias_sums is not None:
            tl.store(bias_sums + first + place, tl.sum(bias_sum[index], axis=0), mask=place < COLUMNS)


@triton.jit
def _sum_programs(sums, result, programs, COLUMNS: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_COLUMNS: tl.constexpr):
    column = tl.program_id(0) * SUM_COLUMNS + tl.arange(0, SUM_COLUMNS)
    total = tl.zeros((SUM_ROWS, SUM_COLUMNS), dtype=tl.float32)
    start = 0
    while start < programs:
        row = start + tl.arange(0, SUM_ROWS)[:, None]
        place = row.to(tl.int64) * COLUMNS + column[None, :]
        total += tl.load(sums + place, mask=(row < programs) & (column[None, :] < COLUMNS), other=0.0)
        start += SUM_ROWS
    tl.store(result + column, tl.sum(total, axis=0).to(result.dtype.element_ty), mask=column < COLUMNS)


@triton.jit(do_not_specialize=["programs"])
def sum_programs_kernel(
    sums,
    result,
    more_sums,
    more_result,
    programs,
    COLUMNS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
):
    """Sum `sums` [programs, COLUMNS] over programs into result. The grid's second axis does more_result likewise."""
    if tl.program_id(1) == 0:
        _sum_programs(sums, result, programs, COLUMNS, SUM_ROWS, SUM_COLUMNS)
    elif more_sums is not None:
        _sum_programs(more_sums, more_result, programs, COLUMNS, SUM_ROWS, SUM_COLUMNS)
