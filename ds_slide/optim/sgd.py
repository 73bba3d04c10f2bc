"""Stochastic gradient descent with momentum, with the formulas of torch.optim.SGD.

    g = g + weight_decay * w
    b = momentum * b + (1 - dampening) * g      (b = g in the first update)
    w = w - lr * (g + momentum * b if nesterov else b)

Without momentum there is no b, and a parameter has no state but its weight.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ds_slide.errors import SlideConfigError
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
from ds_slide.optim.rule import Elements, StateSpec, UpdateRule, fp32, options_on, range_problems, require_ranges

# Parameters of torch's SGD that change the result and that DS-Slide does not have.
_REFUSED = ("maximize", "differentiable")


class SgdConstants(NamedTuple):
    """One step's numbers, in the order of csrc/update/sgd.hpp."""

    grad_scale: float
    weight_decay: float
    lr: float
    momentum: float
    one_minus_dampening: float


@dataclass(frozen=True)
class SgdHyper:
    """Hyper-parameters of one update of one parameter group. ``step`` is the number of this update, 1 at the first.
    ``keeps_momentum``: whether its rule has the momentum state, which another group may need.
    Raises SlideConfigError for values outside their range."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    step: int = 1
    keeps_momentum: bool = True

    def __post_init__(self) -> None:
        require_ranges(
            "lr, momentum and weight_decay are finite and not negative, dampening is finite, step counts from 1",
            ("lr", self.lr, 0.0 <= self.lr < math.inf),
            ("momentum", self.momentum, 0.0 <= self.momentum < math.inf),
            ("dampening", self.dampening, math.isfinite(self.dampening)),
            ("weight_decay", self.weight_decay, 0.0 <= self.weight_decay < math.inf),
            ("step", self.step, self.step >= 1),
        )
        if self.momentum and not self.keeps_momentum:
            raise SlideConfigError(
                f"optimizer parameter 'momentum' is {self.momentum}, but it was 0 in all parameter groups when the "
                "engine was built, so that there is no momentum_buffer; give a group momentum from the beginning."
            )

    @property
    def rule(self) -> UpdateRule:
        return SGD_MOMENTUM if self.keeps_momentum else SGD

    @property
    def kernel(self) -> str:
        if not self.keeps_momentum:
            return "sgd"
        return "sgd_nesterov" if self.nesterov and self.momentum else "sgd_momentum"

    @property
    def two_passes(self) -> bool:
        return False  # weight decay makes the new momentum depend on the old weight

    def constants(self, grad_scale: float = 1.0) -> SgdConstants:
        # Like in torch, the first gradient enters the buffer whole, and a group without momentum has no dampening.
        dampening = 0.0 if self.step == 1 or not self.momentum else self.dampening
        return SgdConstants(
            grad_scale=fp32(grad_scale),
            weight_decay=fp32(self.weight_decay),
            lr=fp32(self.lr),
            momentum=fp32(self.momentum),
            one_minus_dampening=fp32(1.0 - dampening),
        )


def _hyper_of(group: Mapping[str, Any], step: int, _optimizer: Any, *, keeps_momentum: bool = True) -> SgdHyper:
    return SgdHyper(
        lr=float(group["lr"]),
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        weight_decay=float(group["weight_decay"]),
        nesterov=bool(group["nesterov"]),
        step=int(step),
        keeps_momentum=keeps_momentum,
    )


def _reference_step(
    hyper: SgdHyper, c: SgdConstants, w: torch.Tensor, g: torch.Tensor, states: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    g = add(g, mul(w, c.weight_decay))
    states = [add(mul(b, c.momentum), mul(g, c.one_minus_dampening)) for b in states]
    for b in states:
        g = add(g, mul(b, c.momentum)) if hyper.kernel == "sgd_nesterov" else b
    return sub(w, mul(g, c.lr)), states


@triton.jit
def _sgd_kernel(  # type: ignore[no-untyped-def]
    high_buffer,
    low_buffer,
    momentum_buffer,
    gradient,
    numel,
    grad_scale,
    weight_decay,
    lr,
    momentum,
    one_minus_dampening,
    HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    w = load_master(high_buffer, low_buffer, offsets, mask)

    g = flush(flush(g) * grad_scale)
    g = flush(g + flush(w * weight_decay))
    if HAS_MOMENTUM:
        b = flush(tl.load(momentum_buffer + offsets, mask=mask, other=0.0))
        b = flush(flush(b * momentum) + flush(g * one_minus_dampening))
        tl.store(momentum_buffer + offsets, b, mask=mask)
        if NESTEROV:
            g = flush(g + flush(b * momentum))
        else:
            g = b
    store_master(high_buffer, low_buffer, offsets, mask, flush(w - flush(g * lr)))


def _gpu_step(elements: Elements, hyper: SgdHyper, grad_scale: float) -> None:
    weight, remainder, states, gradient, *_ = elements
    assert remainder is not None
    names = hyper.rule.state_names
    check_buffers("SGD on the GPU", weight, remainder, dict(zip(names, states, strict=True)), gradient)
    for high, low, g, *kept in vector_parts((weight, remainder, gradient, *states)):
        _sgd_kernel[grid(high.numel())](
            high.view(torch.int16),
            low,
            kept[0] if kept else low,  # never read without momentum
            g,
            high.numel(),
            *hyper.constants(grad_scale),
            HAS_MOMENTUM=bool(kept),
            NESTEROV=hyper.kernel == "sgd_nesterov",
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _problems(optimizer: Any) -> Iterator[str]:
    yield from range_problems(_hyper_of, optimizer)
    for index, group in enumerate(optimizer.param_groups):
        yield from options_on(_REFUSED, group, index)


SGD_MOMENTUM = UpdateRule(
    name="SGD with momentum",
    states=(StateSpec("momentum_buffer"),),
    state_dtypes=("fp32",),
    hyper_of=_hyper_of,
    reference_step=_reference_step,
    gpu_step=_gpu_step,
    problems=_problems,
)
SGD = dataclasses.replace(
    SGD_MOMENTUM,
    name="SGD without momentum",
    states=(),
    hyper_of=functools.partial(_hyper_of, keeps_momentum=False),
)


def rule_of(optimizer: Any) -> UpdateRule:
    """Return `SGD` where no group of `optimizer` has momentum, else `SGD_MOMENTUM`."""
    return SGD_MOMENTUM if any(group["momentum"] for group in optimizer.param_groups) else SGD
