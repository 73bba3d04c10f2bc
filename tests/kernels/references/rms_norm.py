"""`rms_norm` and `add_rms_norm` in plain torch."""

from __future__ import annotations

import torch


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, offset: float = 0.0, round_before_weight: bool
) -> torch.Tensor:
    """y [..., h] of x [..., h] and weight [h]; every step in fp32, or in fp64 where x is fp64.

    With `round_before_weight` the normalised x is rounded to x's dtype and the product to the promoted dtype of x and
    weight; without, the product is rounded to x's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    value = x.to(wide)
    normalised = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normalised.to(x.dtype)
    scale = offset + weight.to(wide)
    if round_before_weight:
        return (normalised.to(x.dtype).to(wide) * scale).to(torch.promote_types(x.dtype, weight.dtype))
    return (normalised * scale).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    round_before_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, total): the sum, rounded to the dtype of its terms, and the norm of the rounded sum."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset=offset, round_before_weight=round_before_weight), total
