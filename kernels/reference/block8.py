"""Block-wise 8-bit codes in plain torch: the conversion that `ds_slide.optim.low_precision` defines for states."""

from __future__ import annotations

import torch

from ds_slide.optim.low_precision import from_fp32, to_fp32


def block8_quantise_reference(values: torch.Tensor, *, signed: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """`(codes, scales)` of values [n], widened to fp32 (exact from bf16 and fp16; fp64 is rounded) and then to nearest:
    the code's binary point lies so that |value| times the rounded reciprocal of the scale, rounded to fp32, needs only
    its bits rounded at bit 20."""
    codes, scales = from_fp32(values.float(), torch.uint8, signed=signed)
    assert scales is not None
    return codes, scales


def block8_dequantise_reference(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, *, signed: bool = True
) -> torch.Tensor:
    """level * scale in fp32, rounded once, then cast to `dtype`."""
    return to_fp32(codes, scales, signed=signed).to(dtype)
