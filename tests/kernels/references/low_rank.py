"""The product of an adapter of low rank, added to a result, in plain torch."""

from __future__ import annotations

import torch


def low_rank_reference(result: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
    """result + (inner @ weight.T) * scaling, with a rounding after each of the three, as PEFT computes it."""
    return result + torch.nn.functional.linear(inner, weight) * scaling
