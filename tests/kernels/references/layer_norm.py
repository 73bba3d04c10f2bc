"""`layer_norm` and `add_layer_norm` in plain torch."""

from __future__ import annotations

import torch


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """y [..., h] of x [..., h], weight [h] and bias [h]; every step in fp32, or in fp64 where x is fp64, rounded once
    to x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    value = x.to(wide)
    centred = value - value.mean(-1, keepdim=True)
    result = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        result = result * weight.to(wide)
    if bias is not None:
        result = result + bias.to(wide)
    return result.to(x.dtype)


def add_layer_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, total): the sum, rounded to the dtype of its terms, and the norm of the rounded sum."""
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps), total
