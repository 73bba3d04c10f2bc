"""Rotary position embedding in plain torch, in the convention of transformers (rotate half)."""

from __future__ import annotations

import torch


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[batch, heads, positions, d] with cos, sin [batch or 1, positions, r], r <= d, in the dtype that results.

    With x = states[..., :r] in two halves: first' = first * cos_first - second * sin_first and
    second' = second * cos_second + first * sin_second. The other d - r dimensions are copied.
    """
    rotary = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, rest = states[..., :rotary], states[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1)


def rope_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `ds_slide.kernels.rope.rotary.rope`, every operation rounded to the dtype of the arguments (any dtype)."""
    return rotate(q, cos, sin), rotate(k, cos, sin)
