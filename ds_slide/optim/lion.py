"""Lion (Chen et al. 2023, arXiv 2302.06675) under the names of DeepSpeed's FusedLion and DeepSpeedCPULion.

    c = beta1 * m + (1 - beta1) * g
    w = (1 - lr * weight_decay) * w - lr * sign(c)
    m = beta2 * m + (1 - beta2) * g

sign(0) is 0, like in the paper. DeepSpeed's two implementations move a weight by lr where c is 0, each in its own
direction. So weights that never had a gradient, such as rows of unused tokens, would drift by lr a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ds_slide.kernels.offload.split_master import (
    BLOCK,
    check_buffers,
    flush,
    grid,
    load_master,
    store_master,
    vector_parts,
)
from ds_slide.optim.rounding import add, mul, sub
from ds_slide.optim.rule import Elements, StateSpec, UpdateRule, fp32, range_problems, require_ranges


class LionConstants(NamedTuple):
    """One step's numbers, in the order of csrc/update/lion.hpp."""

    grad_scale: float
    decay: float
    lr: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float


@dataclass(frozen=True)
class LionHyper:
    """Hyper-parameters of one update of one parameter group. ``step`` is the number of this update, 1 at the first.
    Raises SlideConfigError for values outside their range."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    step: int = 1

    def __post_init__(self) -> None:
        require_ranges(
            "lr and weight_decay are finite and not negative, betas are two numbers in [0, 1), step counts from 1",
            ("lr", self.lr, 0.0 <= self.lr < math.inf),
            ("betas", self.betas, len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas)),
            ("weight_decay", self.weight_decay, 0.0 <= self.weight_decay < math.inf),
            ("step", self.step, self.step >= 1),
        )

    @property
    def rule(self) -> UpdateRule:
        return LION

    @property
    def kernel(self) -> str:
        return "lion"

    @property
    def two_passes(self) -> bool:
        return True

    def constants(self, grad_scale: float = 1.0) -> LionConstants:
        beta1, beta2 = self.betas
        return LionConstants(
            grad_scale=fp32(grad_scale),
            decay=fp32(1.0 - self.lr * self.weight_decay),
            lr=fp32(self.lr),
            beta1=fp32(beta1),
            one_minus_beta1=fp32(1.0 - beta1),
            beta2=fp32(beta2),
            one_minus_beta2=fp32(1.0 - beta2),
        )


def _hyper_of(group: Mapping[str, Any], step: int, _optimizer: Any) -> LionHyper:
    beta1, beta2 = group["betas"]
    return LionHyper(float(group["lr"]), (float(beta1), float(beta2)), float(group["weight_decay"]), int(step))


def _reference_step(
    _hyper: LionHyper, c: LionConstants, w: torch.Tensor, g: torch.Tensor, states: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    (m,) = states
    direction = add(mul(m, c.beta1), mul(g, c.one_minus_beta1))
    move = torch.where(direction == 0, 0.0, torch.copysign(torch.full_like(w, c.lr), direction))
    move = torch.where(direction.isnan(), torch.nan, move)
    return sub(mul(w, c.decay), move), (add(mul(m, c.beta2), mul(g, c.one_minus_beta2)),)


@triton.jit
def _lion_kernel(  # type: ignore[no-untyped-def]
    high_buffer,
    low_buffer,
    exp_avg,
    gradient,
    numel,
    grad_scale,
    decay,
    lr,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    w = load_master(high_buffer, low_buffer, offsets, mask)
    m = flush(tl.load(exp_avg + offsets, mask=mask, other=0.0))

    g = flush(flush(g) * grad_scale)
    direction = flush(flush(m * beta1) + flush(g * one_minus_beta1))
    move = tl.where(direction > 0, lr, tl.where(direction < 0, -lr, tl.where(direction == 0, 0.0, direction)))
    w = flush(flush(w * decay) - move)
    m = flush(flush(m * beta2) + flush(g * one_minus_beta2))

    store_master(high_buffer, low_buffer, offsets, mask, w)
    tl.store(exp_avg + offsets, m, mask=mask)


def _gpu_step(elements: Elements, hyper: LionHyper, grad_scale: float) -> None:
    weight, remainder, (exp_avg,), gradient, *_ = elements
    assert remainder is not None
    check_buffers("Lion on the GPU", weight, remainder, {"exp_avg": exp_avg}, gradient)
    for high, low, m, g in vector_parts((weight, remainder, exp_avg, gradient)):
        _lion_kernel[grid(high.numel())](
            high.view(torch.int16),
            low,
            m,
            g,
            high.numel(),
            *hyper.constants(grad_scale),
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )


LION = UpdateRule(
    name="Lion",
    states=(StateSpec("exp_avg"),),
    state_dtypes=("fp32",),
    hyper_of=_hyper_of,
    reference_step=_reference_step,
    gpu_step=_gpu_step,
    problems=functools.partial(range_problems, _hyper_of),
    two_passes=True,
)
