"""The update of a weight by PDQᵀ, and the loss of a gradient by compression: tiles of PE with E = DQᵀ, never stored.

Bytes of an element of a split master: 4 read, 4 written, and 4 * r read from E in the L2 cache. Programs of the same
columns run side by side, and together read only d1 times the width of a tile of E. Counted for the seven matrices of a
Qwen2.5-1.5B block, d = min(m, n) / 2, r = 4: 386 MB with D are the bound (80 us at 4.8 TB/s), 48 to 96 MB more go
through memory for E, 749 MB come from L2. For 3B: 638 MB (133 us), 81 to 161 and 1233.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_slide.kernels.lsp.gather_sum import expand
from ds_slide.kernels.lsp.sparse import Sparse, expanded_tile
from ds_slide.kernels.lsp.table import COLUMNS, ROWS
from ds_slide.kernels.offload.split_master import flush, load_master, store_master
from ds_slide.kernels.offload.square_sum import combine


@triton.jit
def _tile(program, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return rows, columns, their mask, and the places of a program's elements in a matrix [m, n]."""
    blocks = tl.cdiv(m, ROWS)
    rows = (program % blocks) * ROWS + tl.arange(0, ROWS)
    columns = (program // blocks) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    return rows, columns, mask, rows.to(tl.int64)[:, None] * n + columns[None, :]


@triton.jit
def _random_halves(places, low_key, high_key):
    """Return the upper 16 of the random bits of elements number `places` (csrc/update/rounding.hpp)."""
    x = places.to(tl.uint32) + low_key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) + high_key.to(tl.uint32)
    x = x * 0x846CA68B
    return ((x ^ (x >> 16)) >> 16).to(tl.int32)


@triton.jit
def apply_tile(
    program,
    weight,
    remainder,
    expanded,
    indices,
    values,
    m,
    n,
    decay,
    scale,
    low_key,
    high_key,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Do a tile of ROWS x COLUMNS of W [m, n] = decay * W + scale * PE. The keys are for a weight that is rounded."""
    rows, columns, mask, places = _tile(program, m, n, ROWS, COLUMNS)
    update = expanded_tile(indices, values, expanded, rows, columns, m, n, R)
    if SPLIT:
        old = load_master(weight, remainder, places, mask)
    elif weight.dtype.element_ty == tl.float32:
        old = flush(tl.load(weight + places, mask=mask, other=0.0))
    else:
        upper = tl.load(weight + places, mask=mask, other=0).to(tl.int32)
        old = flush((upper << 16).to(tl.float32, bitcast=True))
    new = flush(flush(old * decay) + flush(flush(update) * scale))
    if SPLIT:
        store_master(weight, remainder, places, mask, new)
    elif weight.dtype.element_ty == tl.float32:
        tl.store(weight + places, new, mask=mask)
    else:
        bits = new.to(tl.int32, bitcast=True)
        rounded = tl.where(new != new, bits | 0x00400000, bits + _random_halves(places, low_key, high_key)) >> 16
        tl.store(weight + places, rounded.to(tl.int16), mask=mask)


@triton.jit(do_not_specialize=["low_key", "high_key"])
def _apply_kernel(
    weight,
    remainder,
    expanded,
    indices,
    values,
    m,
    n,
    decay,
    scale,
    low_key,
    high_key,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    apply_tile(
        tl.program_id(0),
        weight,
        remainder,
        expanded,
        indices,
        values,
        m,
        n,
        decay,
        scale,
        low_key,
        high_key,
        R,
        SPLIT,
        ROWS,
        COLUMNS,
    )


@triton.jit
def _residual_kernel(
    gradient, expanded, indices, values, partial, m, n, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write partial [2, programs] fp64: square sums of PE - G and of G."""
    rows, columns, mask, places = _tile(tl.program_id(0), m, n, ROWS, COLUMNS)
    returned = expanded_tile(indices, values, expanded, rows, columns, m, n, R).to(tl.float64)
    whole = tl.load(gradient + places, mask=mask, other=0.0).to(tl.float32).to(tl.float64)
    lost = tl.where(mask, returned - whole, 0.0)
    tl.store(partial + tl.program_id(0), tl.sum(tl.sum(lost * lost, axis=1), axis=0))
    tl.store(partial + tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(whole * whole, axis=1), axis=0))


def _programs(matrix: torch.Tensor) -> int:
    m, n = matrix.shape
    return triton.cdiv(m, ROWS) * triton.cdiv(n, COLUMNS)


def apply_(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    update: torch.Tensor,
    left: Sparse,
    right: Sparse,
    decay: float,
    scale: float,
    keys: tuple[int, int] | None,
) -> None:
    """Do `ds_slide.compression.lsp.projection.decompress_apply` with checked arguments."""
    bits = weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight
    _apply_kernel[(_programs(weight),)](
        bits,
        bits if remainder is None else remainder,
        expand(update.T.contiguous(), right),
        left.indices,
        left.values,
        *weight.shape,
        decay,
        scale,
        *map(signed, keys or (0, 0)),
        R=left.r,
        SPLIT=remainder is not None,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
        enable_fp_fusion=False,
    )


def signed(key: int) -> int:
    """Return the int32 with the bits of a 32-bit key: launches specialize on a number's type, which its range sets."""
    return key - (1 << 32) if key >> 31 else key


def residual_square_sums(gradient: torch.Tensor, compressed: torch.Tensor, left: Sparse, right: Sparse) -> torch.Tensor:
    """Do `ds_slide.compression.lsp.projection.residual_square_sums` with checked arguments. `compressed` is PᵀGQ."""
    programs = _programs(gradient)
    partial = torch.empty(2, programs, dtype=torch.float64, device=gradient.device)
    sums = torch.empty(2, dtype=torch.float64, device=gradient.device)
    _residual_kernel[(programs,)](
        gradient,
        expand(compressed.T.contiguous(), right),
        left.indices,
        left.values,
        partial,
        *gradient.shape,
        R=left.r,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    for number in range(2):
        combine(partial[number], sums[number], programs)
    return sums
