"""Storage formats of the two moments: fp32, bf16 and 8-bit codes with a scale for each group.

The 8-bit code is a small floating-point number. In a group of 64 elements the scale is the largest magnitude. Magnitude
code ``c`` stands for scale * u. The bits of the fp32 number u are the bits of 1.0 minus ``(top - c) << 20``: eight
levels for each binade, exact at the top. Code 0 is zero. ``exp_avg_sq`` has top 255: its least level is 31.75 binades
below the scale. ``exp_avg`` has a sign bit (128) and top 127: 15.75 binades. csrc has the same code in
update/block8.hpp.

This module rounds deterministically, to nearest. ``from_fp32`` turns the result of ``to_fp32`` back into the same bits,
so a checkpoint in fp32 resumes exactly. The update itself rounds stochastically (ds_slide.optim.rounding). With
``1 - beta2 = 0.001`` an element of ``exp_avg_sq`` moves by far less than half a step of either format. Rounding to
nearest would never move it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ds_slide.errors import SlideError

GROUP = 64
STEP_BITS = 20
CHUNK = 1 << 22  # elements converted at a time, a multiple of GROUP: the temporaries are 4 bytes each


@dataclass(frozen=True)
class StateFormat:
    """How ``exp_avg`` and ``exp_avg_sq`` are stored. ``name`` is the value of ``ds_slide.state_dtype``."""

    name: Literal["fp32", "bf16", "8bit"]
    dtype: torch.dtype
    has_scales: bool
    group: int = GROUP

    def scale_numel(self, numel: int) -> int:
        """Return the number of scales (fp32) of one moment of ``numel`` elements."""
        return -(-numel // self.group) if self.has_scales else 0


STATE_FORMATS: dict[str, StateFormat] = {
    "fp32": StateFormat("fp32", torch.float32, has_scales=False),
    "bf16": StateFormat("bf16", torch.bfloat16, has_scales=False),
    "8bit": StateFormat("8bit", torch.uint8, has_scales=True),
}
_BY_DTYPE = {state_format.dtype: state_format for state_format in STATE_FORMATS.values()}


def state_format_of(exp_avg: torch.Tensor) -> StateFormat:
    """Return the format of a stored moment by its dtype. Raises SlideError when there is none."""
    state_format = _BY_DTYPE.get(exp_avg.dtype)
    if state_format is None:
        raise SlideError(f"a moment stored as {exp_avg.dtype} has no state format; use float32, bfloat16 or uint8.")
    return state_format


def top_code(signed: bool) -> int:
    """Return the magnitude code of the scale itself: 127 beside a sign bit, else 255."""
    return 127 if signed else 255


def least_level(signed: bool) -> float:
    """Return u of magnitude code 1."""
    return 1.25 * 2.0**-16 if signed else 1.25 * 2.0**-32


def zero_code(signed: bool) -> int:
    """Return the bits that u would have for magnitude code 0."""
    return 0x3F800000 - (top_code(signed) << STEP_BITS)


def least_scale(signed: bool) -> float:
    """Return the least scale. With a smaller scale the least level would be subnormal, which counts as zero."""
    return 2.0**-110 if signed else 2.0**-94


def group_scales(values: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Return the scales, fp32 [ceil(n / 64)], of fp32 ``values`` [n]: the exact largest magnitudes.

    A nonzero maximum below 2^-110 (exp_avg) or 2^-94 (exp_avg_sq) is raised to that. A group with a magnitude of 2^126
    or more, an infinity or NaN has the scale NaN.
    """
    bits = _grouped(values.contiguous().view(torch.int32) & 0x7FFFFFFF)
    largest = bits.amax(1)
    scale = largest.view(torch.float32).clamp(min=least_scale(signed))
    scale = torch.where(largest == 0, 0.0, scale)
    return torch.where(largest >= 127 + 126 << 23, torch.nan, scale)  # the bits of 2^126


def levels(values: torch.Tensor, scale: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Return |values| over the scales of their groups, fp32 [n]: times the rounded reciprocal, like in the kernels."""
    reciprocal = (1.0 / scale.clamp(min=least_scale(signed)).double()).float()
    return (values.abs().double() * spread(reciprocal, values.numel()).double()).float()


def to_fp32(stored: torch.Tensor, scale: torch.Tensor | None = None, *, signed: bool) -> torch.Tensor:
    """Return fp32 values [n] of a stored moment [n]: fp32, bf16, or uint8 codes with ``scale`` [ceil(n / 64)].

    ``signed`` is true for ``exp_avg`` and false for ``exp_avg_sq``. The result is always a new tensor.
    """
    if not state_format_of(stored).has_scales:
        return stored.to(torch.float32, copy=True)
    scale = _checked_scale(stored, scale)
    values = torch.empty(stored.shape, dtype=torch.float32, device=stored.device)
    for out, codes, anchors in _chunks(values, stored, scale):
        out.copy_(_decode(codes, anchors, signed))
    return values


def from_fp32(values: torch.Tensor, dtype: torch.dtype, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``(stored, scale)`` of fp32 ``values`` [n] in the format with ``dtype``, rounded to nearest.

    ``scale`` is None except for uint8. A positive ``exp_avg_sq`` below its group's least level is stored as that level:
    a zero would make the step of its element as long as eps allows. Memory beside the result: a chunk of 4 Mi elements.
    """
    if dtype not in _BY_DTYPE:
        raise SlideError(f"moments cannot be stored as {dtype}; use float32, bfloat16 or uint8.")
    if not _BY_DTYPE[dtype].has_scales:
        return values.to(dtype, copy=True), None
    return with_scales(values, signed=signed)


def with_scales(values: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``from_fp32`` to uint8."""
    stored = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scale = torch.empty(-(-values.numel() // GROUP), dtype=torch.float32, device=values.device)
    for codes, part, anchors in _chunks(stored, values, scale):
        # Numbers below 2^-126 count as zero in the update as well.
        normal = torch.where(part.abs() < 2.0**-126, 0.0, part).contiguous()
        anchors.copy_(group_scales(normal, signed=signed))
        level = levels(normal, anchors, signed=signed)
        code = (level.view(torch.int32) + (1 << (STEP_BITS - 1)) - zero_code(signed)) >> STEP_BITS
        # Below half of the least level exp_avg goes to zero.
        kept = level >= 0.5 * least_level(signed) if signed else normal > 0
        codes.copy_(finish_codes(code, kept, normal, anchors, signed=signed))
    return stored, scale


def finish_codes(
    code: torch.Tensor, kept: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, *, signed: bool
) -> torch.Tensor:
    """Return uint8 codes of magnitude codes ``code``: at least 1 where ``kept``, else 0, with sign bits and NaN
    groups."""
    code = code.clamp(min=1)
    if signed:
        code = torch.where(values.signbit(), code | 0x80, code)
    code = torch.where(kept, code, 0)
    return torch.where(spread(scale, code.numel()).isnan(), 0xFF, code).to(torch.uint8)


def spread(scale: torch.Tensor, numel: int) -> torch.Tensor:
    """Repeat each scale for every element of its group, [numel]."""
    return scale.repeat_interleave(GROUP)[:numel]


def _decode(codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> torch.Tensor:
    code = codes.int()
    magnitude = code & top_code(signed)
    level = (zero_code(signed) + (magnitude << STEP_BITS)).view(torch.float32)
    level = torch.where(magnitude == 0, 0.0, level)
    if signed:
        level = torch.where((code > 0x80), -level, level)
    return (level.double() * spread(scale, codes.numel()).double()).float()


def _grouped(values: torch.Tensor) -> torch.Tensor:
    numel = values.numel()
    return torch.nn.functional.pad(values, (0, -numel % GROUP)).view(-1, GROUP)


def _checked_scale(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    expected = -(-stored.numel() // GROUP)
    if scale is None or scale.dtype != torch.float32 or scale.numel() != expected:
        got = "none" if scale is None else f"{scale.numel()} of {scale.dtype}"
        raise SlideError(
            f"8-bit moments of {stored.numel()} elements need {expected} scales of torch.float32, one for every "
            f"{GROUP} elements, but there are {got}."
        )
    return scale


def _chunks(
    first: torch.Tensor, second: torch.Tensor, scale: torch.Tensor
) -> zip[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return flat pieces of two tensors of one size, with their scales."""
    pieces = (first.view(-1).split(CHUNK), second.reshape(-1).split(CHUNK), scale.split(CHUNK // GROUP))
    return zip(*pieces, strict=True)
