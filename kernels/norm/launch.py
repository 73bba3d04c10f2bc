"""Launches of the norms' kernels: checks of inputs, tiles of rows, and allocations."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from ds_slide.errors import SlideError
from ds_slide.kernels.dtypes import KERNEL_DTYPES
from ds_slide.kernels.norm.backward import backward_kernel, sum_programs_kernel
from ds_slide.kernels.norm.rows import forward_kernel
from ds_slide.kernels.norm.wide import wide_backward_kernel, wide_forward_kernel, wide_sums_kernel
from ds_slide.kernels.replay import start


class Tiling(NamedTuple):
    """How the kernels cut a row of at most `longest` elements. The need for registers decides what is fastest.

    `warps` warps hold tiles of `width` elements (a power of two), the last one partly empty. With `ahead` a program
    loads its next row while it reduces one. With `held` it keeps the weight in registers. `resident` programs fit on
    one multiprocessor (used only where each keeps a sum over its rows). A warp has 32 threads, and 64 on AMD, where a
    program has at most 16 warps.
    """

    longest: int
    warps: int
    width: int
    ahead: bool
    held: bool
    resident: int


# Short rows share a tile of this many elements: 128 threads hold 16 each, two loads of 16 bytes in bf16.
TILE = 2048
SHORT = Tiling(TILE, 4, TILE, ahead=True, held=True, resident=4)
# Longer rows take the first tiling that fits. Forward: one row in each program, with the fewest warps that hold it in
# 40 elements of each thread (48 to 96 registers). 4 to 10 rows on a multiprocessor hide the reductions of each other.
FORWARD = (
    Tiling(5120, 4, 1024, ahead=False, held=True, resident=5),
    Tiling(6144, 8, 2048, ahead=False, held=True, resident=2),
    Tiling(8192, 16, 4096, ahead=False, held=True, resident=1),
    Tiling(10240, 8, 2048, ahead=False, held=True, resident=2),
    Tiling(16384, 16, 4096, ahead=False, held=True, resident=1),
)
# LayerNorm reduces twice, and is slower with 16 warps, where RMSNorm is faster (LOG.md).
FORWARD_CENTRED = (FORWARD[0], *FORWARD[3:])
# Backward holds two rows, the next two, the weight and one sum: 16 to 20 elements of each fit in 128 registers.
BACKWARD = (
    Tiling(3072, 8, 1024, ahead=True, held=True, resident=3),
    Tiling(4096, 8, 2048, ahead=True, held=True, resident=2),
    Tiling(5120, 8, 1024, ahead=True, held=True, resident=2),
    Tiling(6144, 16, 2048, ahead=True, held=True, resident=1),
    Tiling(8192, 16, 4096, ahead=True, held=True, resident=1),
    Tiling(16384, 16, 4096, ahead=False, held=False, resident=1),
)
# LayerNorm has two sums: rows of 4096 and 5120 with BACKWARD's tilings would take 170 registers.
BACKWARD_CENTRED = (
    Tiling(3072, 8, 1024, ahead=True, held=True, resident=2),
    Tiling(4096, 8, 2048, ahead=True, held=False, resident=2),
    Tiling(5120, 8, 1024, ahead=False, held=False, resident=2),
    *BACKWARD[3:],
)
# The longest row in registers. Longer rows are walked in blocks of WIDE_BLOCK.
LONGEST_ROW = 16384
WIDE_BLOCK = 4096
WIDE_SEGMENT = 64
# Tiles of a program that loads ahead and keeps no sum over rows. It reads the weights once for all of them. It has
# fewer tiles where less than SHORT_PROGRAMS programs (16 for each multiprocessor) would be left.
SHORT_WALK = 4
SHORT_PROGRAMS = 2112
# With a sum over rows all programs are resident at once on the multiprocessors of an H200. The number is constant,
# because others would add in another order. Each program writes an fp32 row: 2 % more bytes for 16,384 rows of 2,048.
PROCESSORS = 132
# The sum over at most 512 programs waits once for memory, not once for each 64. 8 columns, 32 bytes, are the smallest
# read of memory.
SUM_ROWS, SUM_COLUMNS = 512, 8


def _dense_order(x: torch.Tensor) -> list[int] | None:
    """Return a permutation of the leading dimensions that makes x contiguous. None if x is contiguous or there is
    none."""
    if x.is_contiguous():
        return None
    order = sorted(range(x.dim() - 1), key=x.stride, reverse=True)
    order.append(x.dim() - 1)
    return order if x.permute(order).is_contiguous() else None


def empty_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor of x's shape, in x's order of memory where x is dense with contiguous rows, else
    contiguous."""
    order = _dense_order(x)
    if order is None:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    inverse = sorted(range(x.dim()), key=order.__getitem__)
    return torch.empty([x.shape[index] for index in order], dtype=dtype, device=x.device).permute(inverse)


def empty_row_numbers(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised fp32 tensor with one number for each row of x."""
    return torch.empty(math.prod(x.shape[:-1]), dtype=torch.float32, device=x.device)


def empty_gradient(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Return an uninitialised gradient of `weight`, without elements for None: an operator cannot return None."""
    if weight is None:
        return torch.empty(0, device=x.device)
    return torch.empty(weight.shape, dtype=weight.dtype, device=x.device)


def _row_strides(x: torch.Tensor, order: list[int] | None) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Return x permuted by `order`, and the strides for `_load_rows`. Where no such strides exist, x is copied."""
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


def _tiling(columns: int, table: tuple[Tiling, ...]) -> tuple[int, Tiling, dict[str, int]]:
    """Return the rows of a tile, the chosen tiling, and the kernel's constants."""
    chosen = SHORT if columns <= TILE else next(tiling for tiling in table if columns <= tiling.longest)
    width = min(chosen.width, triton.next_power_of_2(columns))
    if TILE // 2 < columns <= TILE // 4 * 3:  # three tiles of 512, not one of 2048
        width = TILE // 4
    tiles = triton.cdiv(columns, width)
    rows = max(1, TILE // (width * tiles)) if columns <= TILE else 1
    constants = {"COLUMNS": columns, "TILE_ROWS": rows, "TILES": tiles, "WIDTH": width, "num_warps": chosen.warps}
    return rows, chosen, constants


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
    """Return y of `dtype`, total or None, mean fp32 [rows] or None, and rstd fp32 [rows].

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
        start(wide_forward_kernel, (rows,), *tensors, eps, offset, **constants)
        return y, total, mean, rstd
    tile_rows, tiling, constants = _tiling(columns, FORWARD_CENTRED if centred else FORWARD)
    walk = _short_walk(rows, tile_rows) if tiling.ahead else tile_rows
    tensors = (x, residual, weight, bias, y, total, mean, rstd)
    start(
        forward_kernel,
        (triton.cdiv(rows, walk),),
        *tensors,
        rows,
        walk,
        x_strides,
        residual_strides,
        eps,
        offset or None,
        ROUND=round_before_weight,
        AHEAD=tiling.ahead,
        **constants,
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
    """Return dx in the layout of `empty_rows`, dweight and dbias. The last two are empty where they are not asked."""
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
    # The sums of two weights take twice the registers.
    wide = columns > LONGEST_ROW // max(1, count)
    if wide:
        walk = WIDE_SEGMENT
    else:
        tile_rows, tiling, constants = _tiling(columns, BACKWARD if mean is None else BACKWARD_CENTRED)
        walk = _short_walk(rows, tile_rows)
        if count:
            walk = tile_rows * triton.cdiv(triton.cdiv(rows, tile_rows), tiling.resident * PROCESSORS)
    programs = triton.cdiv(rows, walk)
    sums = [
        torch.empty(programs, columns, dtype=torch.float32, device=x.device) if gradient.numel() else None
        for gradient in gradients
    ]
    if wide:
        dy, x, dtotal = dy.contiguous(), x.contiguous(), None if dtotal is None else dtotal.contiguous()
        constants = {"COLUMNS": columns, "BLOCK": WIDE_BLOCK, "num_warps": 8}
        start(wide_backward_kernel, (rows,), dy, x, dtotal, weight, mean, rstd, dx, offset, **constants)
        if count:
            constants = {"ROUND": round_before_weight, "COLUMNS": columns, "SEGMENT": WIDE_SEGMENT, "BLOCK": TILE}
            grid = (programs, triton.cdiv(columns, TILE))
            start(wide_sums_kernel, grid, dy, x, mean, rstd, *sums, rows, **constants, num_warps=4)
    else:
        tensors = (dy, x, dtotal, weight, mean, rstd, dx, *sums)
        start(
            backward_kernel,
            (programs,),
            *tensors,
            rows,
            walk,
            dy_strides,
            x_strides,
            dtotal_strides,
            offset or None,
            ROUND=round_before_weight,
            AHEAD=tiling.ahead,
            HELD=tiling.held,
            **constants,
        )
    if count:
        pairs = [(partial, gradient) for partial, gradient in zip(sums, gradients, strict=True) if partial is not None]
        grid = (triton.cdiv(columns, SUM_COLUMNS), count)
        constants = {"COLUMNS": columns, "SUM_ROWS": SUM_ROWS, "SUM_COLUMNS": SUM_COLUMNS, "num_warps": 8}
        second = pairs[1] if count == 2 else (None, None)
        start(sum_programs_kernel, grid, *pairs[0], *second, programs, **constants)
    return dx, gradients[0], gradients[1]


def check_rows(name: str, x: torch.Tensor, residual: torch.Tensor | None, *weights: torch.Tensor | None) -> None:
    """Raise SlideError for inputs that the kernels do not support."""
    if not x.dim():
        raise SlideError(f"{name} needs x with at least one dimension, [..., h], and was given a scalar.")
    if math.prod(x.shape[:-1]) >= 2**30:
        raise SlideError(f"{name} takes fewer than 2^30 rows and x has {math.prod(x.shape[:-1])} rows: split x.")
    for given in (x, *weights):
        if given is not None and given.dtype not in KERNEL_DTYPES:
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
