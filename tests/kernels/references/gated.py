"""Gated activations (SwiGLU, GeGLU) in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional


def activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """silu: x / (1 + exp(-x)).  gelu: x * (1 + erf(x / sqrt 2)) / 2.
    gelu_tanh: x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2."""
    if activation == "silu":
        return functional.silu(gate)
    if activation not in ("gelu", "gelu_tanh"):
        raise ValueError(activation)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated_reference(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate), rounded to the dtype of the arguments (any dtype), times up, rounded again."""
    return activate(gate, activation) * up


def gated_packed_reference(packed: torch.Tensor, activation: str) -> torch.Tensor:
    """The same on [..., 2 i]: the gate is the first half, as in Phi-3."""
    gate, up = packed.chunk(2, dim=-1)
    return gated_reference(gate, up, activation)
