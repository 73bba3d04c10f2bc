"""Block-wise 8-bit codes on the GPU: quantise and dequantise with the bits of `ds_slide.optim.low_precision`.

Bytes an element (bf16): 2 read and 1 + 1/16 written, or the reverse. A group of 64 is one row of a tile, so its largest
magnitude and its scale are found and used in the same pass. For frozen base weights the signed code (3 bits of
fraction, 4 of exponent with the subnormal end cut) and for states either one.

Where bits could differ from the reference and how they do not: the reciprocal of the scale is the correctly rounded
division; products of two fp32 numbers are rounded once on either side (the reference goes through fp64, in which they
are exact); numbers below 2^-126 are recognised by their bits, whatever the device does with subnormals. The sign and
payload of a NaN may differ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_slide.errors import SlideError
from ds_slide.kernels.dtypes import KERNEL_DTYPES
from ds_slide.optim.low_precision import GROUP, STEP_BITS, least_level, least_scale, zero_code

# Groups of one program: 2048 elements, 32 for each of 64 threads, which took 4 to 12 % less time than 16 a thread.
ROWS = 32
NUM_WARPS = 2
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
SMALLEST_NORMAL_BITS = tl.constexpr(0x00800000)
OVERFLOW_BITS = tl.constexpr(127 + 126 << 23)
_GROUP = tl.constexpr(GROUP)
_STEP_BITS = tl.constexpr(STEP_BITS)
_HALF_STEP = tl.constexpr(1 << (STEP_BITS - 1))


@triton.jit
def _quantise_tile(
    values,
    codes,
    scales,
    rows_left,
    last_numel,
    least_scale,
    half_least_level,
    ZERO_CODE: tl.constexpr,
    SIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    SHORT: tl.constexpr,
):
    """ROWS groups, of which `rows_left` exist; SHORT: one group of `last_numel` elements.

    Only the short group has a mask along its row: it would break the vector loads of all the others.
    """
    groups = tl.arange(0, ROWS)
    lanes = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    present = (lanes < last_numel) if SHORT else (groups < rows_left)[:, None]
    value = tl.load(values + lanes, mask=present, other=0.0).to(tl.float32)

    # Whatever can be decided for a whole group is: some 12 instructions an element are left, and 16 were slower than
    # memory.
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    largest = tl.max(magnitude, axis=1)  # of non-negative floats, bits and values have one order
    raised = tl.maximum(largest.to(tl.float32, bitcast=True), least_scale)
    is_nan = largest >= OVERFLOW_BITS
    # A subnormal counts as zero, as in the update.
    scale = tl.where(is_nan, float("nan"), tl.where(largest < SMALLEST_NORMAL_BITS, 0.0, raised))
    tl.store(scales + groups, scale, mask=groups < rows_left)

    reciprocal = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.where(is_nan, 1.0, raised))
    level = magnitude.to(tl.float32, bitcast=True) * reciprocal[:, None]
    code = (level.to(tl.int32, bitcast=True) + _HALF_STEP - ZERO_CODE) >> _STEP_BITS
    code = tl.maximum(code, 1)
    if SIGNED:
        code = code | ((bits >> 24) & 0x80)
        # The second is the level of the smallest normal number. No subnormal has it too: where it is the larger of the
        # two, levels of neighbours are at least 1.25 units in the last place apart.
        least = tl.maximum(half_least_level, SMALLEST_NORMAL * reciprocal)
        kept = level >= tl.where(is_nan, float("nan"), least)[:, None]
    else:
        # As integers: neither negative nor subnormal.
        kept = bits > tl.where(is_nan, 0x7FFFFFFF, SMALLEST_NORMAL_BITS - 1)[:, None]
    code = tl.where(kept, code, tl.where(is_nan, 0xFF, 0)[:, None])
    tl.store(codes + lanes, code.to(tl.uint8), mask=present)


# The counts change with every tensor: 0 and 1 would otherwise be specialised as constants.
@triton.jit(do_not_specialize=["whole_groups", "last_numel"])
def _quantise_kernel(
    values,
    codes,
    scales,
    whole_groups,
    last_numel,
    least_scale,
    half_least_level,
    ZERO_CODE: tl.constexpr,
    SIGNED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS
    if row < whole_groups:
        left = tl.minimum(whole_groups - row, ROWS).to(tl.int32)
        _quantise_tile(
            values + row * _GROUP,
            codes + row * _GROUP,
            scales + row,
            left,
            last_numel,
            least_scale,
            half_least_level,
            ZERO_CODE,
            SIGNED,
            ROWS,
            False,
        )
    else:
        end = whole_groups.to(tl.int64)
        _quantise_tile(
            values + end * _GROUP,
            codes + end * _GROUP,
            scales + end,
            1,
            last_numel,
            least_scale,
            half_least_level,
            ZERO_CODE,
            SIGNED,
            1,
            True,
        )


@triton.jit
def _dequantise_tile(
    codes,
    scales,
    values,
    rows_left,
    last_numel,
    ZERO_CODE: tl.constexpr,
    SIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    SHORT: tl.constexpr,
):
    groups = tl.arange(0, ROWS)
    lanes = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    present = (lanes < last_numel) if SHORT else (groups < rows_left)[:, None]
    code = tl.load(codes + lanes, mask=present, other=0).to(tl.int32)
    scale = tl.load(scales + groups, mask=groups < rows_left, other=0.0)

    magnitude = (code & 0x7F) if SIGNED else code
    level = ZERO_CODE + (magnitude << _STEP_BITS)
    if SIGNED:
        level = level | ((code & 0x80) << 24)
    level = tl.where(magnitude == 0, 0, level)
    value = level.to(tl.float32, bitcast=True) * scale[:, None]
    tl.store(values + lanes, value.to(values.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["whole_groups", "last_numel"])
def _dequantise_kernel(
    codes,
    scales,
    values,
    whole_groups,
    last_numel,
    ZERO_CODE: tl.constexpr,
    SIGNED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS
    if row < whole_groups:
        left = tl.minimum(whole_groups - row, ROWS).to(tl.int32)
        _dequantise_tile(
            codes + row * _GROUP, scales + row, values + row * _GROUP, left, last_numel, ZERO_CODE, SIGNED, ROWS, False
        )
    else:
        end = whole_groups.to(tl.int64)
        _dequantise_tile(
            codes + end * _GROUP, scales + end, values + end * _GROUP, 1, last_numel, ZERO_CODE, SIGNED, 1, True
        )


def _grid(numel: int) -> tuple[int]:
    """One program for every ROWS whole groups, and one more for a short group at the end."""
    return (triton.cdiv(numel // GROUP, ROWS) + (numel % GROUP > 0),)


def _num_groups(numel: int) -> int:
    return -(-numel // GROUP)


def _check(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, operation: str) -> None:
    if values.dim() != 1 or values.dtype not in KERNEL_DTYPES:
        raise SlideError(
            f"{operation}: values must be flat and bfloat16, float16 or float32, but they are {values.dtype} of shape "
            f"{list(values.shape)}."
        )
    groups = _num_groups(values.numel())
    if (codes.dtype, codes.shape, scales.dtype, scales.shape) != (
        torch.uint8,
        values.shape,
        torch.float32,
        (groups,),
    ):
        raise SlideError(
            f"{operation}: {values.numel()} values need as many uint8 codes and {groups} float32 scales, but there are "
            f"{list(codes.shape)} of {codes.dtype} and {list(scales.shape)} of {scales.dtype}."
        )
    if not values.device == codes.device == scales.device:
        raise SlideError(
            f"{operation}: values are on {values.device}, codes on {codes.device} and scales on {scales.device}; put "
            "them on one device."
        )


def _check_written(operation: str, *written: torch.Tensor) -> None:
    if not all(tensor.is_contiguous() for tensor in written):
        raise SlideError(f"{operation}: what is written must be contiguous; pass a flat, contiguous `out`.")


@torch.library.custom_op("ds_slide::block8_quantise_out", mutates_args=("codes", "scales"))
def _quantise_out(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> None:
    _check(values, codes, scales, "block8_quantise")
    _check_written("block8_quantise", codes, scales)
    numel = values.numel()
    if not numel:
        return
    _quantise_kernel[_grid(numel)](
        values.contiguous(),
        codes,
        scales,
        numel // GROUP,
        numel % GROUP,
        least_scale(signed),
        0.5 * least_level(signed),
        ZERO_CODE=zero_code(signed),
        SIGNED=signed,
        ROWS=ROWS,
        num_warps=NUM_WARPS,
    )


@_quantise_out.register_fake
def _(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> None:  # noqa: ARG001
    _check(values, codes, scales, "block8_quantise")


@torch.library.custom_op("ds_slide::block8_dequantise_out", mutates_args=("out",))
def _dequantise_out(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, signed: bool) -> None:
    _check(out, codes, scales, "block8_dequantise")
    _check_written("block8_dequantise", out)
    numel = out.numel()
    if not numel:
        return
    _dequantise_kernel[_grid(numel)](
        codes.contiguous(),
        scales.contiguous(),
        out,
        numel // GROUP,
        numel % GROUP,
        ZERO_CODE=zero_code(signed),
        SIGNED=signed,
        ROWS=ROWS,
        num_warps=NUM_WARPS,
    )


@_dequantise_out.register_fake
def _(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, signed: bool) -> None:  # noqa: ARG001
    _check(out, codes, scales, "block8_dequantise")


def _empty_codes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    return codes, torch.empty(_num_groups(values.numel()), dtype=torch.float32, device=values.device)


@torch.library.custom_op("ds_slide::block8_quantise", mutates_args=())
def _quantise(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = _empty_codes(values)
    _quantise_out(values, codes, scales, signed)
    return codes, scales


@_quantise.register_fake
def _(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG001
    codes, scales = _empty_codes(values)
    _check(values, codes, scales, "block8_quantise")
    return codes, scales


@torch.library.custom_op("ds_slide::block8_dequantise", mutates_args=())
def _dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, signed: bool) -> torch.Tensor:
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    _dequantise_out(codes, scales, out, signed)
    return out


@_dequantise.register_fake
def _(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, signed: bool) -> torch.Tensor:  # noqa: ARG001
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    _check(out, codes, scales, "block8_dequantise")
    return out


def block8_quantise(
    values: torch.Tensor, *, signed: bool = True, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(codes, scales)`: uint8 [n] and fp32 [ceil(n / 64)] of values [n] (bf16, fp16 or fp32), rounded to nearest.

    n is any number; the last group may be short. A group of 64 that holds inf, nan or a magnitude of 2^126 or more has
    the scale nan. `signed`: 7 bits and a sign, for weights and exp_avg; otherwise 8 bits, for exp_avg_sq, and what is
    negative becomes 0. `out`: contiguous tensors to write instead of new ones; they are returned. Has no gradient.
    Raises SlideError for another shape, dtype or device.
    """
    if out is None:
        return _quantise(values, signed)
    _quantise_out(values, *out, signed)
    return out


def block8_dequantise(
    codes: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    signed: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values [n] in `dtype` (bf16, fp16 or fp32) of uint8 codes [n] and fp32 scales [ceil(n / 64)].

    The fp32 product of level and scale is rounded once, then once more to `dtype`. `out`: a flat contiguous plane [n]
    to write instead of a new tensor (a part of the window's buffer); its dtype counts, and it is returned. Has no
    gradient. Raises SlideError for another shape, dtype or device.
    """
    if (dtype is None) == (out is None):
        raise SlideError("block8_dequantise: pass either `dtype` for a new tensor or `out`, whose dtype counts.")
    if out is not None:
        _dequantise_out(codes, scales, out, signed)
        return out
    assert dtype is not None
    return _dequantise(codes, scales, dtype, signed)
