"""RMSNorm, alone or of the sum with a residual, and the row kernels that LayerNorm shares (it adds a mean and a bias).

Bytes an element of 16 bits: forward 2 read, 2 written (with a residual 4 and 4); backward 4 read, 2 written (with a
residual 6 and 2). Only the fp32 scale of each row is saved beside the input. The weight's gradient is summed in fp32:
a program walks a run of rows and keeps its sum in registers, and a small kernel adds the programs' sums. Launches
depend on the shape alone, so the bits do not depend on the device's size.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ds_slide.errors import SlideError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Elements of one program's tile: 128 threads hold 16 each, two loads of 16 bytes in bf16. Short rows share a tile.
TILE = 2048
# 16 warps are 512 threads here and 1024, the most a program may have, where a warp has 64 lanes (AMD).
MOST_WARPS = 16
# The longest row held in registers: 32 elements a thread. Longer rows are walked in blocks of WIDE_BLOCK.
LONGEST_ROW = 16384
WIDE_BLOCK = 4096
# Without a sum over rows: tiles a program walks, weights being read once for all of them, the next tile loaded while
# one is reduced. Fewer where less than SHORT_PROGRAMS programs (16 for each of 132 multiprocessors) would be left.
SHORT_WALK = 4
SHORT_PROGRAMS = 2112
# With one: most programs, by warps, as many as 132 multiprocessors hold at 128 registers a thread. Each writes an fp32
# row; with 16,384 rows of 2,048 that adds 2 % to the bytes.
SUM_PROGRAMS = {4: 528, 8: 264, 16: 132}
SUM_ROWS, SUM_COLUMNS = 64, 32
WIDE_SEGMENT = 64


@triton.jit
def _load_rows(source, strides, row, end, column, COLUMNS: tl.constexpr):
    """Tile of `source` in its own dtype; row r starts at (r // s0) * s1 + (r % s0) * s2."""
    start = (row // strides[0]).to(tl.int64) * strides[1] + (row % strides[0]).to(tl.int64) * strides[2]
    return tl.load(source + start + column, mask=(row < end) & (column < COLUMNS), other=0.0)


@triton.jit
def _load_scale(weight, offset, column, COLUMNS: tl.constexpr):
    return tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32) + offset


@triton.jit
def _normalised(value, mean, rstd, present):
    result = value.to(tl.float32)
    if mean is not None:
        result = tl.where(present, result - mean, 0.0)
    return result * rstd


@triton.jit(do_not_specialize=["rows", "walk"])
def _forward_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    mean,
    rstd,
    rows,
    walk,
    x_strides,
    residual_strides,
    eps,
    offset,
    ROUND: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    lane = tl.arange(0, TILE_ROWS)[:, None]
    start = tl.program_id(0) * walk
    end = tl.minimum(start + walk, rows)
    value = _load_rows(x, x_strides, start + lane, end, column, COLUMNS)
    if residual is not None:
        other = _load_rows(residual, residual_strides, start + lane, end, column, COLUMNS)
    if weight is not None:
        scale = _load_scale(weight, offset, column, COLUMNS)
    if bias is not None:
        shift = _load_scale(bias, 0.0, column, COLUMNS)
    while start < end:  # the interpreter cannot take a range of a run-time number
        row = start + lane
        inside = (row < end) & (column < COLUMNS)
        place = row.to(tl.int64) * COLUMNS + column
        # Asked for before this tile is reduced: the reduction's barriers would otherwise leave the memory idle.
        value_ahead = _load_rows(x, x_strides, row + TILE_ROWS, end, column, COLUMNS)
        if residual is not None:
            other_ahead = _load_rows(residual, residual_strides, row + TILE_ROWS, end, column, COLUMNS)
            value = (value.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
            tl.store(total + place, value, mask=inside)
            other = other_ahead
        centred = value.to(tl.float32)
        if mean is not None:
            row_mean = tl.sum(centred, axis=1, keep_dims=True) / COLUMNS
            tl.store(mean + row, row_mean, mask=row < end)
            centred = tl.where(column < COLUMNS, centred - row_mean, 0.0)
        row_rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / COLUMNS + eps)
        tl.store(rstd + row, row_rstd, mask=row < end)
        result = centred * row_rstd
        if weight is not None:
            if ROUND:
                result = result.to(x.dtype.element_ty).to(tl.float32)
            result *= scale
        if bias is not None:
            result += shift
        tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)
        value = value_ahead
        start += TILE_ROWS


@triton.jit(do_not_specialize=["rows", "walk"])
def _backward_kernel(
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
    TILE_COLUMNS: tl.constexpr,
):
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    lane = tl.arange(0, TILE_ROWS)[:, None]
    start = tl.program_id(0) * walk
    end = tl.minimum(start + walk, rows)
    row = start + lane
    gradient = _load_rows(dy, dy_strides, row, end, column, COLUMNS)
    value = _load_rows(x, x_strides, row, end, column, COLUMNS)
    row_rstd = tl.load(rstd + row, mask=row < end, other=0.0)
    row_mean = None
    if mean is not None:
        row_mean = tl.load(mean + row, mask=row < end, other=0.0)
    if weight is not None:
        scale = _load_scale(weight, offset, column, COLUMNS)
    if weight_sums is not None:
        weight_sum = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
    if bias_sums is not None:
        bias_sum = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
    while start < end:
        row = start + lane
        # The next tile is asked for before this one is reduced, as in the forward kernel.
        ahead = row + TILE_ROWS
        gradient_ahead = _load_rows(dy, dy_strides, ahead, end, column, COLUMNS)
        value_ahead = _load_rows(x, x_strides, ahead, end, column, COLUMNS)
        rstd_ahead = tl.load(rstd + ahead, mask=ahead < end, other=0.0)
        if mean is not None:
            mean_ahead = tl.load(mean + ahead, mask=ahead < end, other=0.0)
        if dtotal is not None:
            straight = _load_rows(dtotal, dtotal_strides, row, end, column, COLUMNS)
        normalised = _normalised(value, row_mean, row_rstd, column < COLUMNS)
        scaled = gradient.to(tl.float32)
        if bias_sums is not None:
            bias_sum += scaled
        if weight_sums is not None:
            if ROUND:  # what the weight was multiplied with
                weight_sum += scaled * normalised.to(x.dtype.element_ty).to(tl.float32)
            else:
                weight_sum += scaled * normalised
        if weight is not None:
            scaled *= scale
        inner_product = tl.sum(scaled * normalised, axis=1, keep_dims=True) / COLUMNS
        if mean is not None:
            scaled -= tl.sum(scaled, axis=1, keep_dims=True) / COLUMNS
        result = (scaled - normalised * inner_product) * row_rstd
        if dtotal is not None:
            result += straight.to(tl.float32)
        place = row.to(tl.int64) * COLUMNS + column
        tl.store(dx + place, result.to(dx.dtype.element_ty), mask=(row < end) & (column < COLUMNS))
        gradient = gradient_ahead
        value = value_ahead
        row_rstd = rstd_ahead
        if mean is not None:
            row_mean = mean_ahead
        start += TILE_ROWS
    lanes = tl.arange(0, TILE_COLUMNS)
    place = tl.program_id(0).to(tl.int64) * COLUMNS + lanes
    if weight_sums is not None:
        tl.store(weight_sums + place, tl.sum(weight_sum, axis=0), mask=lanes < COLUMNS)
    if bias_sums is not None:
        tl.store(bias_sums + place, tl.sum(bias_sum, axis=0), mask=lanes < COLUMNS)


@triton.jit(do_not_specialize=["programs"])
def _sum_programs_kernel(
    sums, result, programs, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    total = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
    start = 0
    while start < programs:
        row = start + tl.arange(0, TILE_ROWS)[:, None]
        place = row.to(tl.int64) * COLUMNS + column[None, :]
        total += tl.load(sums + place, mask=(row < programs) & (column[None, :] < COLUMNS), other=0.0)
        start += TILE_ROWS
    tl.store(result + column, tl.sum(total, axis=0).to(result.dtype.element_ty), mask=column < COLUMNS)


# Rows longer than LONGEST_ROW: a program walks the columns of one row, again for each reduction; what it reads again
# still lies in the cache. All tensors are contiguous here.


@triton.jit
def _load_wide(x, residual, place, present):
    value = tl.load(x + place, mask=present, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + place, mask=present, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _wide_forward_kernel(
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
        # Added again, not read back from `total`: what other threads stored is not visible without a barrier.
        result = (_load_wide(x, residual, first + column, column < COLUMNS) - row_mean) * row_rstd
        if weight is not None:
            if ROUND:
                result = result.to(x.dtype.element_ty).to(tl.float32)
            result *= _load_scale(weight, offset, column, COLUMNS)
        if bias is not None:
            result += _load_scale(bias, 0.0, column, COLUMNS)
        tl.store(y + first + column, result.to(y.dtype.element_ty), mask=column < COLUMNS)


@triton.jit
def _wide_backward_kernel(dy, x, dtotal, weight, mean, rstd, dx, offset, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
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
def _wide_sums_kernel(
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


def _dense_order(x: torch.Tensor) -> list[int] | None:
    """Permutation of the leading dimensions that makes x contiguous, None when x is contiguous or none does."""
    if x.is_contiguous():
        return None
    order = sorted(range(x.dim() - 1), key=x.stride, reverse=True)
    order.append(x.dim() - 1)
    return order if x.permute(order).is_contiguous() else None


def empty_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised, of x's shape; in x's order of memory where x is dense with contiguous rows, else contiguous."""
    order = _dense_order(x)
    if order is None:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    inverse = sorted(range(x.dim()), key=order.__getitem__)
    return torch.empty([x.shape[index] for index in order], dtype=dtype, device=x.device).permute(inverse)


def empty_row_numbers(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised fp32, one number for each row of x."""
    return torch.empty(math.prod(x.shape[:-1]), dtype=torch.float32, device=x.device)


def empty_gradient(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Uninitialised gradient of `weight`, of no elements for None: an operator cannot return None."""
    if weight is None:
        return torch.empty(0, device=x.device)
    return torch.empty(weight.shape, dtype=weight.dtype, device=x.device)


def _row_strides(x: torch.Tensor, order: list[int] | None) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """x permuted by `order` with the numbers that `_load_rows` takes; a copy of it where no such numbers exist."""
    columns = x.shape[-1]
    if order is not None:
        x = x.permute(order)
    if x.is_contiguous():
        return x, (1, columns, 0)
    levels: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        elif size > 1:
            levels.append((size, stride))
    if len(levels) > 2 or columns > 1 != x.stride(-1):
        return x.contiguous(), (1, columns, 0)
    if len(levels) == 2:
        return x, (levels[1][0], levels[0][1], levels[1][1])
    return x, (1, levels[0][1] if levels else columns, 0)


def _tile(columns: int) -> tuple[int, int, int]:
    """(rows of a tile, its columns, warps)."""
    padded = triton.next_power_of_2(columns)
    rows = max(1, TILE // padded)
    return rows, padded, min(MOST_WARPS, 4 * rows * padded // TILE)


def _short_walk(rows: int, tile_rows: int) -> int:
    return tile_rows * max(1, min(SHORT_WALK, rows // (tile_rows * SHORT_PROGRAMS)))


def forward_rows(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    dtype: torch.dtype,
    centred: bool,
    offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """(y of `dtype`, total or None, mean fp32 [rows] or None, rstd fp32 [rows]).

    Rows are numbered in x's order of memory where x is dense, else in the order of its indices.
    """
    columns, rows = x.shape[-1], math.prod(x.shape[:-1])
    y = empty_rows(x, dtype)
    total = None if residual is None else empty_rows(x, x.dtype)
    mean = empty_row_numbers(x) if centred else None
    rstd = empty_row_numbers(x)
    if not rows or not columns:
        return y, total, mean, rstd
    order = _dense_order(x)
    x, x_strides = _row_strides(x, order)
    residual_strides = (1, columns, 0)
    if residual is not None:
        residual, residual_strides = _row_strides(residual, order)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    if columns > LONGEST_ROW:
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        tensors = (x, residual, weight, bias, y, total, mean, rstd)
        constants = {"ROUND": round_before_weight, "COLUMNS": columns, "BLOCK": WIDE_BLOCK, "num_warps": 8}
        _wide_forward_kernel[(rows,)](*tensors, eps, offset, **constants)
        return y, total, mean, rstd
    tile_rows, tile_columns, num_warps = _tile(columns)
    walk = _short_walk(rows, tile_rows)
    tensors = (x, residual, weight, bias, y, total, mean, rstd)
    _forward_kernel[(triton.cdiv(rows, walk),)](
        *tensors,
        rows,
        walk,
        x_strides,
        residual_strides,
        eps,
        offset,
        ROUND=round_before_weight,
        COLUMNS=columns,
        TILE_ROWS=tile_rows,
        TILE_COLUMNS=tile_columns,
        num_warps=num_warps,
    )
    return y, total, mean, rstd


def backward_rows(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    *,
    weight_grad: bool,
    offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx as `empty_rows` lays it out, dweight, dbias); the last two are empty where there is none or none is asked."""
    columns, rows = x.shape[-1], math.prod(x.shape[:-1])
    dx = empty_rows(x, x.dtype)
    gradients = [empty_gradient(x, given if weight_grad else None) for given in (weight, bias)]
    if not rows or not columns:
        return dx, gradients[0].zero_(), gradients[1].zero_()
    order = _dense_order(x)
    dy, dy_strides = _row_strides(dy, order)
    x, x_strides = _row_strides(x, order)
    dtotal_strides = (1, columns, 0)
    if dtotal is not None:
        dtotal, dtotal_strides = _row_strides(dtotal, order)
    weight = None if weight is None else weight.contiguous()
    count = sum(gradient.numel() > 0 for gradient in gradients)
    tile_rows, tile_columns, num_warps = _tile(columns)
    # The sums of two weights take twice the registers.
    wide = columns > LONGEST_ROW // max(1, count)
    if wide:
        walk = WIDE_SEGMENT
    elif count:
        walk = tile_rows * triton.cdiv(triton.cdiv(rows, tile_rows), SUM_PROGRAMS[num_warps])
    else:
        walk = _short_walk(rows, tile_rows)
    programs = triton.cdiv(rows, walk)
    sums = [
        torch.empty(programs, columns, dtype=torch.float32, device=x.device) if gradient.numel() else None
        for gradient in gradients
    ]
    if wide:
        dy, x, dtotal = dy.contiguous(), x.contiguous(), None if dtotal is None else dtotal.contiguous()
        constants = {"COLUMNS": columns, "BLOCK": WIDE_BLOCK, "num_warps": 8}
        _wide_backward_kernel[(rows,)](dy, x, dtotal, weight, mean, rstd, dx, offset, **constants)
        if count:
            constants = {"ROUND": round_before_weight, "COLUMNS": columns, "SEGMENT": WIDE_SEGMENT, "BLOCK": TILE}
            grid = (programs, triton.cdiv(columns, TILE))
            _wide_sums_kernel[grid](dy, x, mean, rstd, *sums, rows, **constants, num_warps=4)
    else:
        tensors = (dy, x, dtotal, weight, mean, rstd, dx, *sums)
        _backward_kernel[(programs,)](
            *tensors,
            rows,
            walk,
            dy_strides,
            x_strides,
            dtotal_strides,
            offset,
            ROUND=round_before_weight,
            COLUMNS=columns,
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=tile_columns,
            num_warps=num_warps,
        )
    for partial, gradient in zip(sums, gradients, strict=True):
        if partial is not None:
            constants = {"COLUMNS": columns, "TILE_ROWS": SUM_ROWS, "TILE_COLUMNS": SUM_COLUMNS, "num_warps": 4}
            _sum_programs_kernel[(triton.cdiv(columns, SUM_COLUMNS),)](partial, gradient, programs, **constants)
    return dx, gradients[0], gradients[1]


def check_rows(name: str, x: torch.Tensor, residual: torch.Tensor | None, *weights: torch.Tensor | None) -> None:
    """Raise SlideError for what the kernels do not compute."""
    if not x.dim():
        raise SlideError(f"{name} needs x with at least one dimension, [..., h], and was given a scalar.")
    if math.prod(x.shape[:-1]) >= 2**30:
        raise SlideError(f"{name} takes fewer than 2^30 rows and x has {math.prod(x.shape[:-1])} rows: split x.")
    for given in (x, *weights):
        if given is not None and given.dtype not in DTYPES:
            raise SlideError(f"{name} takes bfloat16, float16 and float32 and was given {given.dtype}: convert it.")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise SlideError(
            f"{name} adds x and residual of one shape and dtype and was given {list(x.shape)} {x.dtype} and "
            f"{list(residual.shape)} {residual.dtype}: expand or convert one of them."
        )
    for weight in weights:
        if weight is not None and weight.shape != x.shape[-1:]:
            raise SlideError(
                f"{name} takes weights of the shape of x's last dimension, {list(x.shape[-1:])}, and was given "
                f"{list(weight.shape)}."
            )


def _y_dtype(x: torch.Tensor, weight: torch.Tensor | None, round_before_weight: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if weight is not None and round_before_weight else x.dtype


@torch.library.custom_op(
    "ds_slide::rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, float eps, float offset, bool round_before_weight) -> (Tensor, Tensor)",
)
def _rms_norm(x, weight, eps, offset, round_before_weight):
    settings = {"offset": offset, "round_before_weight": round_before_weight}
    dtype = _y_dtype(x, weight, round_before_weight)
    y, _, _, rstd = forward_rows(x, None, weight, None, eps, dtype=dtype, centred=False, **settings)
    return y, rstd


@_rms_norm.register_fake
def _(x, weight, eps, offset, round_before_weight):  # noqa: ARG001
    return empty_rows(x, _y_dtype(x, weight, round_before_weight)), empty_row_numbers(x)


@torch.library.custom_op(
    "ds_slide::add_rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, bool round_before_weight)"
    " -> (Tensor, Tensor, Tensor)",
)
def _add_rms_norm(x, residual, weight, eps, offset, round_before_weight):
    settings = {"offset": offset, "round_before_weight": round_before_weight}
    dtype = _y_dtype(x, weight, round_before_weight)
    y, total, _, rstd = forward_rows(x, residual, weight, None, eps, dtype=dtype, centred=False, **settings)
    return y, total, rstd


@_add_rms_norm.register_fake
def _(x, residual, weight, eps, offset, round_before_weight):  # noqa: ARG001
    y = empty_rows(x, _y_dtype(x, weight, round_before_weight))
    return y, empty_rows(x, x.dtype), empty_row_numbers(x)


@torch.library.custom_op(
    "ds_slide::rms_norm_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor? dtotal, Tensor x, Tensor? weight, Tensor rstd, float offset, bool round_before_weight,"
    " bool weight_grad) -> (Tensor, Tensor)",
)
def _rms_norm_backward(dy, dtotal, x, weight, rstd, offset, round_before_weight, weight_grad):
    settings = {"weight_grad": weight_grad, "offset": offset, "round_before_weight": round_before_weight}
    dx, dweight, _ = backward_rows(dy, dtotal, x, weight, None, None, rstd, **settings)
    return dx, dweight


@_rms_norm_backward.register_fake
def _(dy, dtotal, x, weight, rstd, offset, round_before_weight, weight_grad):  # noqa: ARG001
    return empty_rows(x, x.dtype), empty_gradient(x, weight if weight_grad else None)


def _save(ctx, inputs, output):
    x, weight, _, *arguments = inputs
    _, rstd = output
    ctx.save_for_backward(x, weight, rstd)
    ctx.arguments = arguments
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, _):
    if dy is None:
        return None, None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    weight_grad = ctx.needs_input_grad[1]
    dx, dweight = _rms_norm_backward(dy, None, x, weight, rstd, *ctx.arguments, weight_grad)
    return dx, dweight if weight_grad else None, None, None, None


def _add_save(ctx, inputs, output):
    _, _, weight, _, *arguments = inputs
    _, total, rstd = output
    ctx.save_for_backward(total, weight, rstd)
    ctx.arguments = arguments
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _add_backward(ctx, dy, dtotal, _):
    if dy is None:  # only the sum was used
        return dtotal, dtotal, None, None, None, None
    total, weight, rstd = ctx.saved_tensors
    weight_grad = ctx.needs_input_grad[2]
    dx, dweight = _rms_norm_backward(dy, dtotal, total, weight, rstd, *ctx.arguments, weight_grad)
    return dx, dx, dweight if weight_grad else None, None, None, None


_rms_norm.register_autograd(_backward, setup_context=_save)
_add_rms_norm.register_autograd(_add_backward, setup_context=_add_save)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, offset: float = 0.0, round_before_weight: bool
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, in fp32; one pass over x.

    x [..., h] and weight [h] or None (no factor at all) are bf16, fp16 or fp32. With `round_before_weight` (Llama,
    Qwen) the normalised x is rounded to x's dtype before the product, and y has the promoted dtype of x and weight;
    without (Gemma, where offset is 1) only the product is rounded, to x's dtype. y has x's order of memory where x is
    dense. x is read where it lies if its rows are contiguous and lie at one or two strides, else it is copied first.
    Raises SlideError for other dtypes or shapes; cannot be differentiated twice.
    """
    check_rows("rms_norm", x, None, weight)
    return _rms_norm(x, weight, eps, offset, round_before_weight)[0]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    round_before_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, total): total = x + residual, rounded to their dtype, and y = rms_norm(total), in one pass.

    x and residual [..., h] have one shape and dtype; the rest is as in `rms_norm`. Both get the same gradient, one
    tensor.
    """
    check_rows("add_rms_norm", x, residual, weight)
    y, total, _ = _add_rms_norm(x, residual, weight, eps, offset, round_before_weight)
    return y, total
