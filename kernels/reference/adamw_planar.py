"""`adamw_planar_` in plain torch: the rule that the CPU kernel follows too, for planes."""

from __future__ import annotations

import torch

from ds_slide.optim.hyper import AdamWHyper
from ds_slide.optim.reference import reference_update_


def adamw_planar_reference_(
    weight: torch.Tensor,
    remainder: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    hyper: AdamWHyper,
    grad_scale: float,
) -> None:
    """One step in place on planes [n]: bf16 weight, int16 remainder, fp32 moments; gradient of any floating dtype.

        w = fp32(weight, remainder);  g = grad_scale * fp32(gradient)
        AdamW:  w = (1 - lr * weight_decay) * w        Adam with L2:  g = g + weight_decay * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        w = w - lr / (1 - beta1^step) * m / (sqrt(v) * (1 / sqrt(1 - beta2^step)) + eps)

    Each operation is rounded to fp32 by itself, and subnormal operands and results become zero of their sign; the
    factors are rounded once to fp32 before (`AdamWHyper.constants`). The new w is split into both planes, of which it
    can be put together again exactly (`encode_planar`).
    """
    reference_update_(weight, remainder, (exp_avg, exp_avg_sq), gradient, hyper, grad_scale)
