"""Forward kernel of norms over rows in registers, for RMSNorm and for LayerNorm, which adds a mean and a bias.

A row is cut into TILES register tiles of one size, a power of two. Only the last tile is partly empty: a row of 5,120
in one tile would leave 3 lanes of 8 idle. The tiles are summed lane by lane first, so any number of tiles needs only
one reduction across the program.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def present(inside, column, TILE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the mask of tile TILE. The columns are compared only where some are missing."""
    result = inside
    if (TILE + 1) * WIDTH > COLUMNS:
        result = inside & (TILE * WIDTH + column < COLUMNS)
    return result


@triton.jit
def normalise(value, mean, rstd, column, TILE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return (value - mean) * rstd of tile TILE, zero where it has no columns. A mean of None is zero."""
    result = value.to(tl.float32)
    if mean is not None:
        result -= mean
        if (TILE + 1) * WIDTH > COLUMNS:
            result = tl.where(TILE * WIDTH + column < COLUMNS, result, 0.0)
    return result * rstd


# The backward pass lets rows leave the nearest cache first, because every program reads the weights there again. In the
# forward pass that hint cost 4 % at 4096 and 8192 columns (LOG.md).
FORWARD_EVICTION = tl.constexpr("")
BACKWARD_EVICTION = tl.constexpr("evict_first")


@triton.jit
def load_rows(
    source,
    strides,
    row,
    end,
    column,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Load tiles of `source` in its own dtype. Row r starts at (r // s0) * s1 + (r % s0) * s2."""
    start = (row // strides[0]).to(tl.int64) * strides[1] + (row % strides[0]).to(tl.int64) * strides[2]
    tiles = ()
    for index in tl.static_range(TILES):
        mask = present(row < end, column, index, COLUMNS, WIDTH)
        place = source + start + index * WIDTH + column
        tiles += (tl.load(place, mask=mask, other=0.0, eviction_policy=EVICTION),)
    return tiles


@triton.jit
def load_weight_tile(weight, column, TILE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    place = TILE * WIDTH + column
    return tl.load(weight + place, mask=place < COLUMNS, other=0.0, eviction_policy="evict_last")


@triton.jit
def load_weight(weight, column, COLUMNS: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr):
    """Load tiles of `weight` in its own dtype, which takes half the registers of fp32 until they are used."""
    tiles = ()
    for index in tl.static_range(TILES):
        tiles += (load_weight_tile(weight, column, index, COLUMNS, WIDTH),)
    return tiles


@triton.jit
def with_offset(weight, offset):
    """Return weight + offset in fp32. An offset of None is zero and costs nothing."""
    result = weight.to(tl.float32)
    if offset is not None:
        result += offset
    return result


@triton.jit
def _norm_tiles(
    value,
    other,
    scale,
    shift,
    y,
    total,
    mean,
    rstd,
    row,
    end,
    eps,
    offset,
    ROUND: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    column = tl.arange(0, WIDTH)[None, :]
    place = row.to(tl.int64) * COLUMNS + column
    if other is not None:
        summed = ()
        for index in tl.static_range(TILES):
            both = (value[index].to(tl.float32) + other[index].to(tl.float32)).to(total.dtype.element_ty)
            mask = present(row < end, column, index, COLUMNS, WIDTH)
            tl.store(total + place + index * WIDTH, both, mask=mask)
            summed += (both,)
        value = summed
    row_mean = None
    if mean is not None:
        sums = value[0].to(tl.float32)
        for index in tl.static_range(1, TILES):
            sums += value[index].to(tl.float32)
        row_mean = tl.sum(sums, axis=1, keep_dims=True) / COLUMNS
        tl.store(mean + row, row_mean, mask=row < end)
    # The sum uses centred values. The squares' mean less the mean's square would cancel where the mean is large.
    squares = tl.zeros(value[0].shape, dtype=tl.float32)
    for index in tl.static_range(TILES):
        centred = normalise(value[index], row_mean, 1.0, column, index, COLUMNS, WIDTH)
        squares += centred * centred
    row_rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / COLUMNS + eps)
    tl.store(rstd + row, row_rstd, mask=row < end)
    for index in tl.static_range(TILES):
        result = normalise(value[index], row_mean, row_rstd, column, index, COLUMNS, WIDTH)
        if scale is not None:
            if ROUND:
                result = result.to(value[0].dtype).to(tl.float32)
            result *= with_offset(scale[index], offset)
        if shift is not None:
            result += shift[index].to(tl.float32)
        mask = present(row < end, column, index, COLUMNS, WIDTH)
        tl.store(y + place + index * WIDTH, result.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "walk"])
def forward_kernel(
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
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Do TILE_ROWS rows in each program. With AHEAD do `walk` rows, and load the next ones during a reduction."""
    column = tl.arange(0, WIDTH)[None, :]
    row = tl.program_id(0) * walk + tl.arange(0, TILE_ROWS)[:, None]
    end = tl.minimum(tl.program_id(0) * walk + walk, rows)
    value = load_rows(x, x_strides, row, end, column, COLUMNS, TILES, WIDTH, FORWARD_EVICTION)
    other = None
    if residual is not None:
        other = load_rows(residual, residual_strides, row, end, column, COLUMNS, TILES, WIDTH, FORWARD_EVICTION)
    scale = None
    if weight is not None:
        scale = load_weight(weight, column, COLUMNS, TILES, WIDTH)
    shift = None
    if bias is not None:
        shift = load_weight(bias, column, COLUMNS, TILES, WIDTH)
    if AHEAD:
        start = tl.program_id(0) * walk
        while start < end:  # the interpreter cannot take a range of a run-time number
            row = start + tl.arange(0, TILE_ROWS)[:, None]
            # The load starts before this tile's reduction: otherwise the reduction's barriers leave the memory idle.
            ahead = row + TILE_ROWS
            value_ahead = load_rows(x, x_strides, ahead, end, column, COLUMNS, TILES, WIDTH, FORWARD_EVICTION)
            if residual is not None:
                other_ahead = load_rows(
                    residual, residual_strides, ahead, end, column, COLUMNS, TILES, WIDTH, FORWARD_EVICTION
                )
            _norm_tiles(
                value, other, scale, shift, y, total, mean, rstd, row, end, eps, offset, ROUND, COLUMNS, TILES, WIDTH
            )
            value = value_ahead
            if residual is not None:
                other = other_ahead
            start += TILE_ROWS
    else:
        _norm_tiles(
            value, other, scale, shift, y, total, mean, rstd, row, end, eps, offset, ROUND, COLUMNS, TILES, WIDTH
        )
