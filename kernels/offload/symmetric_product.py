"""Products of matrices whose result is symmetric: each tile of one triangle is computed once and stored twice.

That is half of the multiplications of a plain product. In Muon's iteration these are X X^T, and the products of two
polynomials of it, which commute. Sums are in fp32. The program of a tile reads nothing of other matrices, so a batch
changes no bit. Tile sizes are given by the caller; none is chosen by a measurement at run time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ds_slide.errors import SlideError
from ds_slide.kernels.launch import Compiled, aligned, launch
from ds_slide.kernels.offload.tiles import Tiles

DTYPES = (torch.float16, torch.bfloat16)
_COMPILED: Compiled = {}


@triton.jit
def _corner(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr):
    """Return the first row and column of a tile. Squares are numbered row by row of the lower triangle, and tiles
    column by column of their square."""
    HIGH: tl.constexpr = SIDE // ROWS
    WIDE: tl.constexpr = SIDE // COLUMNS
    square = tile // (HIGH * WIDE)
    inner = tile % (HIGH * WIDE)
    down = ((tl.sqrt(8.0 * square.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The root is rounded: it may be the number before or after.
    down = tl.where(down * (down + 1) // 2 > square, down - 1, down)
    down = tl.where((down + 1) * (down + 2) // 2 <= square, down + 1, down)
    across = square - down * (down + 1) // 2
    return down * SIDE + (inner % HIGH) * ROWS, across * SIDE + (inner // HIGH) * COLUMNS


@triton.jit
def _product(left, right, rows, columns, n, K: tl.constexpr, TURNED: tl.constexpr, DEPTH: tl.constexpr):
    """Return the sums of one tile, fp32. `rows`, `columns`: within the matrices."""
    depth = tl.arange(0, DEPTH)
    if TURNED:
        lefts = left + depth[:, None] * n + rows[None, :]
        rights = right + depth[:, None] * n + columns[None, :]
        step = DEPTH * n
    else:
        lefts = left + rows[:, None] * K + depth[None, :]
        rights = right + columns[None, :] * K + depth[:, None]
        step = DEPTH
    sums = tl.zeros((rows.shape[0], columns.shape[0]), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        if K % DEPTH == 0:
            a = tl.load(lefts)
            b = tl.load(rights)
        else:
            there = depth < K - start
            a = tl.load(lefts, mask=there[:, None] if TURNED else there[None, :], other=0.0)
            b = tl.load(rights, mask=there[:, None], other=0.0)
        if TURNED:
            a = tl.trans(a)
        sums = tl.dot(a, b, sums)
        lefts += step
        rights += step
    return sums


@triton.jit
def _described_product(
    left,
    right,
    matrix,
    first_row,
    first_column,
    K: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return the sums of one tile, fp32. `left`, `right`: descriptors, which read zeros outside of a matrix."""
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        if TURNED:
            a = tl.trans(tl.reshape(left.load([matrix, start, first_row]), (DEPTH, ROWS)))
            b = tl.reshape(right.load([matrix, start, first_column]), (DEPTH, COLUMNS))
        else:
            a = tl.reshape(left.load([matrix, first_row, start]), (ROWS, DEPTH))
            b = tl.trans(tl.reshape(right.load([matrix, first_column, start]), (COLUMNS, DEPTH)))
        sums = tl.dot(a, b, sums)
    return sums


@triton.jit
def _store(result, values, rows, columns, n, TRIANGLE: tl.constexpr):
    """Store a tile and its mirror image. TRIANGLE: only those elements that are not above the diagonal."""
    places = result + rows[:, None] * n + columns[None, :]
    mirrored = result + columns[None, :] * n + rows[:, None]
    if TRIANGLE:
        mask = (columns[None, :] <= rows[:, None]) & (rows[:, None] < n)
        tl.store(places, values, mask=mask)
        tl.store(mirrored, values, mask=mask)
    else:
        tl.store(places, values)
        tl.store(mirrored, values)


@triton.jit
def _store_all(result, shifted, values, shift, rows, columns, n, SHIFTS: tl.constexpr, TRIANGLE: tl.constexpr):
    rounded = values.to(result.dtype.element_ty)
    _store(result, rounded, rows, columns, n, TRIANGLE)
    if SHIFTS:
        diagonal = rows[:, None] == columns[None, :]
        other = rounded.to(tl.float32) + tl.where(diagonal, shift, 0.0)
        _store(shifted, other.to(result.dtype.element_ty), rows, columns, n, TRIANGLE)


@triton.jit
def _symmetric_kernel(
    left,
    right,
    added,
    result,
    shifted,
    n,
    programs,
    alpha,
    beta,
    shift,
    K: tl.constexpr,
    TURNED: tl.constexpr,
    ADDS: tl.constexpr,
    SHIFTS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WHOLE_N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SIDE: tl.constexpr,
):
    matrix = (tl.program_id(0) // programs).to(tl.int64)
    first_row, first_column = _corner(tl.program_id(0) % programs, ROWS, COLUMNS, SIDE)
    if (first_row >= n) | (first_column >= n) | (first_column >= first_row + ROWS):
        return
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    if WHOLE_N:
        near, far = rows, columns
    else:  # what other rows and columns give is not stored
        near, far = rows % n, columns % n
    square = matrix * n * n
    if DESCRIBED:
        place = (tl.program_id(0) // programs).to(tl.int32)
        sums = _described_product(left, right, place, first_row, first_column, K, TURNED, ROWS, COLUMNS, DEPTH)
    else:
        factors = matrix * n * K
        sums = _product(left + factors, right + factors, near, far, n, K, TURNED, DEPTH)
    values = sums * alpha
    if ADDS:
        values += beta * tl.load(added + square + near[:, None] * n + far[None, :]).to(tl.float32)
    below = first_column + COLUMNS <= first_row
    if WHOLE_N:
        # Nothing is masked in most tiles, where a mask would make each number an access of its own.
        if below:
            _store_all(result + square, shifted + square, values, shift, rows, columns, n, SHIFTS, False)
        else:
            _store_all(result + square, shifted + square, values, shift, rows, columns, n, SHIFTS, True)
    else:
        _store_all(result + square, shifted + square, values, shift, rows, columns, n, SHIFTS, True)


def symmetric_product_(
    result: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    tiles: Tiles,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    added: torch.Tensor | None = None,
    shift: float = 0.0,
    shifted: torch.Tensor | None = None,
) -> None:
    """Set each `result` [b, n, n] to ``alpha * left @ right^T + beta * added``, which has to be symmetric, without
    waiting.

    Only sums of the lower triangle are computed, so the result is symmetric to the bit.

    left, right: [b, n, k], both contiguous, or both transposed views of contiguous [b, k, n]. fp16 or bf16, like all
        others. `right` may be `left`, and a symmetric one is its own transpose.
    added, shifted: [b, n, n], contiguous. Only `result` and `shifted` are written; they overlap no other.
    shifted: the rounded result plus `shift` times the unit matrix.
    Raises SlideError for another shape, dtype, device or strides.
    """
    batch, n, k = left.shape
    turned = not left.is_contiguous()
    _check(result, left, right, added, shifted, turned)
    tensors = [left, right, result if added is None else added, result, result if shifted is None else shifted]
    factors = _described(left, right, tiles, turned) if tiles.described else [left, right]
    programs, larger = tiles.programs(n), max(tiles.rows, tiles.columns)
    launch(
        _COMPILED,
        _symmetric_kernel,
        (left.device, left.dtype, n, programs) if aligned(tensors) else None,
        batch * programs,
        [*factors, *tensors[2:], n, programs, alpha, beta, shift],
        K=k,
        TURNED=turned,
        ADDS=added is not None,
        SHIFTS=shifted is not None,
        DESCRIBED=tiles.described,
        WHOLE_N=n % larger == 0,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        SIDE=tiles.side,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _described(left: torch.Tensor, right: torch.Tensor, tiles: Tiles, turned: bool) -> list[Any]:
    """Return descriptors of the factors. Hopper's copy engine reads whole tiles by them, without addresses in
    registers."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # since Triton 3.4

    n, k = left.shape[1:]
    if n % 8 or k % 8:
        raise SlideError(f"descriptors need sides of multiples of 8, but a matrix is {n} x {k}")
    made = []
    for factor, size in ((left, tiles.rows), (right, tiles.columns)):
        block = [1, tiles.depth, size] if turned else [1, size, tiles.depth]
        made.append(TensorDescriptor.from_tensor(factor.mT if turned else factor, block))
    return made


def _check(
    result: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    added: torch.Tensor | None,
    shifted: torch.Tensor | None,
    turned: bool,
) -> None:
    batch, n, k = left.shape
    if n * max(n, k) >= 2**31:
        raise SlideError(f"a matrix of {n} x {k} has more elements than 32 bits can number")
    squares = {"result": result, "added": added, "shifted": shifted}
    shapes = {"left": (left, (batch, n, k)), "right": (right, (batch, n, k))}
    shapes |= {name: (each, (batch, n, n)) for name, each in squares.items() if each is not None}
    for name, (tensor, shape) in shapes.items():
        own = tensor.mT if turned and name in ("left", "right") else tensor
        if tuple(tensor.shape) != shape or not own.is_contiguous():
            raise SlideError(
                f"{name} of symmetric_product_ must be contiguous and {shape}, it is {tuple(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES or (tensor.dtype, tensor.device) != (left.dtype, left.device):
            raise SlideError(f"{name} of symmetric_product_ is {tensor.dtype} on {tensor.device}, left is {left.dtype}")


@triton.jit
def _turn_kernel(source, norms, target, rows, columns, HIGH: tl.constexpr, WIDE: tl.constexpr):
    matrix = tl.program_id(2).to(tl.int64)
    r = tl.program_id(1) * HIGH + tl.arange(0, HIGH)
    c = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    mask = (r[:, None] < rows) & (c[None, :] < columns)
    base = matrix * rows * columns
    values = tl.load(source + base + r[:, None] * columns + c[None, :], mask=mask, other=0.0).to(tl.float32)
    values = tl.div_rn(values, tl.load(norms + matrix).to(tl.float32))
    tl.store(target + base + c[None, :] * rows + r[:, None], values.to(target.dtype.element_ty), mask=mask)


def divided_and_turned_(target: torch.Tensor, source: torch.Tensor, norms: torch.Tensor) -> None:
    """Set `target` [b, columns, rows] to the transpose of `source` [b, rows, columns], each matrix divided by its norm,
    without waiting. In torch, reads or writes of a transposing copy are in pieces of one element.

    norms: [b] in any shape. All are contiguous. Rounds as torch does."""
    batch, rows, columns = source.shape
    if tuple(target.shape) != (batch, columns, rows) or not (target.is_contiguous() and source.is_contiguous()):
        raise SlideError(f"target of divided_and_turned_ must be contiguous and {(batch, columns, rows)}")
    side = 64
    programs = (triton.cdiv(columns, side), triton.cdiv(rows, side), batch)
    _turn_kernel[programs](source, norms, target, rows, columns, HIGH=side, WIDE=side, num_warps=4)
