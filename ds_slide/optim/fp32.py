"""fp32 arithmetic in plain torch, on any device: what the C++ and GPU kernels of every rule must match bit by bit.

Every operation is done in fp64 on fp32 operands and rounded to fp32 at once. For +, -, *, / and sqrt that gives the
correctly rounded fp32 result (53 bits are at least 2 * 24 + 2, so the second rounding is harmless), and it does not
depend on how torch computes fp32 on some device: no fused multiply-add, no approximate square root, no flushing mode.
"""

from __future__ import annotations

import torch

# Flush to zero as x86 processors do it (MXCSR.FTZ): a result is subnormal when it is below 2^-126 after rounding with
# an exponent range that has no lower end. From 2^-126 - 2^-151 on, such rounding gives 2^-126, which stays.
_FLUSHED_BELOW = 2.0**-126 - 2.0**-151


def rounded(exact: torch.Tensor) -> torch.Tensor:
    """fp32 of fp64 ``exact``; what would be subnormal becomes zero of its sign."""
    return torch.where(exact.abs() < _FLUSHED_BELOW, torch.copysign(torch.zeros_like(exact), exact), exact).float()


def flush(value: torch.Tensor) -> torch.Tensor:
    return rounded(value.double())


def mul(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    return rounded(a.double() * (b.double() if isinstance(b, torch.Tensor) else b))


def add(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    return rounded(a.double() + (b.double() if isinstance(b, torch.Tensor) else b))


def sub(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return rounded(a.double() - b.double())


def div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return rounded(a.double() / b.double())


def sqrt(a: torch.Tensor) -> torch.Tensor:
    return rounded(a.double().sqrt())
