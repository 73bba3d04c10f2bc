"""Kernels of norms over rows too long for registers. A program walks the columns of one row again for each reduction,
and finds them in the cache. All tensors are contiguous here.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_scale(weight, offset, column, COLUMNS: tl.constexpr):
    return tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32) + offset


@triton.jit
def _normalised(value, mean, rstd, present):
    result = value.to(tl.float32)
    if mean is not None:
        result = tl.where(present, result - mean, 0.0)
    return result * rstd


@triton.jit
def _load_wide(x, residual, place, present):
    value = tl.load(x + place, mask=present, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + place, mask=present, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def wide_forward_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    mean,
    rstd,
    eps,
    offset,
    ROUND: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    first = row.to(tl.int64) * COLUMNS
    lane = tl.arange(0, BLOCK)
    row_mean = 0.0
    if mean is not None:
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            column = start + lane
            sums += _load_wide(x, residual, first + column, column < COLUMNS)
        row_mean = tl.sum(sums, axis=0) / COLUMNS
        tl.store(mean + row, row_mean)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        column = start + lane
        value = _load_wide(x, residual, first + column, column < COLUMNS)
        if residual is not None:
            tl.store(total + first + column, value.to(total.dtype.element_ty), mask=column < COLUMNS)
        centred = tl.where(column < COLUMNS, value - row_mean, 0.0)
        squares += centred * centred
    row_rstd = tl.rsqrt(tl.sum(squares, axis=0) / COLUMNS + eps)
    tl.store(rstd + row, row_rstd)
    for start in range(0, COLUMNS, BLOCK):
        column = start + lane
        # The sum is computed again, not read from `total`: stores of other threads are not visible without a barrier.
        result = (_load_wide(x, residual, first + column, column < COLUMNS) - row_mean) * row_rstd
        if weight is not None:
            if ROUND:
                result = result.to(x.dtype.element_ty).to(tl.float32)
            result *= _load_scale(weight, offset, column, COLUMNS)
        if bias is not None:
            result += _load_scale(bias, 0.0, column, COLUMNS)
        tl.store(y + first + column, result.to(y.dtype.element_ty), mask=column < COLUMNS)


@triton.jit
def wide_backward_kernel(dy, x, dtotal, weight, mean, rstd, dx, offset, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    first = row.to(tl.int64) * COLUMNS
    lane = tl.arange(0, BLOCK)
    row_rstd = tl.load(rstd + row)
    row_mean = None
    if mean is not None:
        row_mean = tl.load(mean + row)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        column = start + lane
        present = column < COLUMNS
        scaled = tl.load(dy + first + column, mask=present, other=0.0).to(tl.float32)
        if weight is not None:
            scaled *= _load_scale(weight, offset, column, COLUMNS)
        value = tl.load(x + first + column, mask=present, other=0.0)
        products += scaled * _normalised(value, row_mean, row_rstd, present)
        sums += scaled
    inner_product = tl.sum(products, axis=0) / COLUMNS
    for start in range(0, COLUMNS, BLOCK):
        column = start + lane
        present = column < COLUMNS
        scaled = tl.load(dy + first + column, mask=present, other=0.0).to(tl.float32)
        if weight is not None:
            scaled *= _load_scale(weight, offset, column, COLUMNS)
        if mean is not None:
            scaled -= tl.sum(sums, axis=0) / COLUMNS
        value = tl.load(x + first + column, mask=present, other=0.0)
        result = (scaled - _normalised(value, row_mean, row_rstd, present) * inner_product) * row_rstd
        if dtotal is not None:
            result += tl.load(dtotal + first + column, mask=present, other=0.0).to(tl.float32)
        tl.store(dx + first + column, result.to(dx.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["rows"])
def wide_sums_kernel(
    dy,
    x,
    mean,
    rstd,
    weight_sums,
    bias_sums,
    rows,
    ROUND: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    bias_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(0, SEGMENT):
        row = tl.program_id(0) * SEGMENT + step
        present = (column < COLUMNS) & (row < rows)
        place = row.to(tl.int64) * COLUMNS + column
        gradient = tl.load(dy + place, mask=present, other=0.0).to(tl.float32)
        bias_sum += gradient
        if weight_sums is not None:
            row_mean = None
            if mean is not None:
                row_mean = tl.load(mean + row, mask=row < rows, other=0.0)
            row_rstd = tl.load(rstd + row, mask=row < rows, other=0.0)
            normalised = _normalised(tl.load(x + place, mask=present, other=0.0), row_mean, row_rstd, present)
            if ROUND:
                normalised = normalised.to(x.dtype.element_ty).to(tl.float32)
            weight_sum += gradient * normalised
    place = tl.program_id(0).to(tl.int64) * COLUMNS + column
    if weight_sums is not None:
        tl.store(weight_sums + place, weight_sum, mask=column < COLUMNS)
    if bias_sums is not None:
        tl.store(bias_sums + place, bias_sum, mask=column < COLUMNS)
