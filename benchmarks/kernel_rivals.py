"""The same operations by others: Hugging Face's formulas in eager PyTorch, torch's own fused ones, and Liger-Kernel."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from kernel_problem import System
from torch import Tensor
from torch.nn import functional

EPS = 1e-6
IGNORED = -100


def _wide(tensor: Tensor) -> Tensor:
    """fp32, as Hugging Face computes norms and losses; fp64 stays what it is, for the references."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = _wide(x)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def eager_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return eager_rms_norm(total, weight), total


def eager_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, EPS)


def eager_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return eager_layer_norm(total, weight, bias), total


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def eager_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin, rotated = cos.unsqueeze(1), sin.unsqueeze(1), cos.shape[-1]

    def turn(x: Tensor) -> Tensor:
        part = x[..., :rotated]
        turned = part * cos + _rotate_half(part) * sin
        return turned if rotated == x.shape[-1] else torch.cat((turned, x[..., rotated:]), dim=-1)

    return turn(q), turn(k)


def eager_silu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def eager_gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh") * up


def eager_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels, ignore_index=IGNORED)


def torch_rms_norm() -> System:
    return lambda x, weight: functional.rms_norm(x, weight.shape, weight, EPS)


def torch_loss() -> System:
    """torch's own fused loss with the choices that it makes by itself; AttributeError where this torch has none."""
    if not hasattr(functional, "linear_cross_entropy"):
        raise AttributeError(f"torch {torch.__version__} has no functional.linear_cross_entropy")
    options: Any = torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, weight, labels: functional.linear_cross_entropy(
        hidden, weight, labels, ignore_index=IGNORED, options=options
    )


def _liger(name: str) -> Any:
    """A function of Liger-Kernel's functional interface; ImportError where it is not installed."""
    return getattr(importlib.import_module("liger_kernel.transformers.functional"), name)


def liger_rms_norm() -> System:
    call = _liger("liger_rms_norm")
    return lambda x, weight: call(x, weight, EPS)


def liger_add_rms_norm() -> System:
    call = _liger("liger_fused_add_rms_norm")
    return lambda x, residual, weight: call(x, residual, weight, EPS)


def liger_layer_norm() -> System:
    call = _liger("liger_layer_norm")
    return lambda x, weight, bias: call(x, weight, bias, EPS)


def liger_rope() -> System:
    call = _liger("liger_rope")
    # An alias, because it writes into q and k, and in a model they are no leaves either.
    return lambda q, k, cos, sin: call(q.view_as(q), k.view_as(k), cos, sin)


def liger_silu() -> System:
    return _liger("liger_swiglu")  # type: ignore[no-any-return]


def liger_gelu_tanh() -> System:
    return _liger("liger_geglu")  # type: ignore[no-any-return]


def liger_loss(accumulate: torch.dtype | None = None) -> System:
    """Liger's default adds the weight's gradient up in the weight's dtype; `accumulate` is its other choice."""
    call = _liger("liger_fused_linear_cross_entropy")
    return lambda hidden, weight, labels: call(hidden, weight, labels, ignore_index=IGNORED, accum_dtype=accumulate)


def loss_reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Loss and gradients in fp64, 1024 rows at a time: all logits at once would be 20 GB."""
    wide = weight.detach().double()
    counted = (labels != IGNORED).sum()
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    d_hidden, d_weight = torch.empty_like(hidden, dtype=torch.float64), torch.zeros_like(wide)
    for rows in torch.arange(len(hidden), device=hidden.device).split(1024):
        part, targets = hidden.detach()[rows].double(), labels[rows]
        keep = (targets != IGNORED).double().unsqueeze(1)
        picked = targets.clamp(min=0).unsqueeze(1)
        logits = part @ wide.T
        scale = torch.logsumexp(logits, 1, keepdim=True)
        loss += ((scale - logits.gather(1, picked)) * keep).sum()
        slope = torch.exp(logits.sub_(scale)).scatter_add_(1, picked, -torch.ones_like(scale)).mul_(keep / counted)
        d_hidden[rows] = slope @ wide
        d_weight.addmm_(slope.T, part)
    return {"loss": loss / counted, "d hidden": d_hidden, "d weight": d_weight}
