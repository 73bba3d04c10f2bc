"""AdamW, and Adam with L2: hyper-parameters, the numbers that every implementation uses, reference and GPU step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ds_slide.errors import SlideConfigError
from ds_slide.optim.rounding import add, div, mul, sqrt, sub
from ds_slide.optim.rule import Elements, StateSpec, UpdateRule, fp32, options_on, require_ranges

# Parameters of torch's Adam that change the result and that DS-Slide does not have.
_REFUSED = ("amsgrad", "maximize", "differentiable")


class AdamWConstants(NamedTuple):
    """One step's numbers, in the order of csrc/update/adamw.hpp. They are computed in double and rounded once to fp32,
    subnormals to zero.

    The C++ kernels, the torch reference and the GPU kernel all start from these numbers, so that their bits agree.
    """

    grad_scale: float
    decay: float
    weight_decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inv_bc2_sqrt: float
    step_size: float
    eps: float


@dataclass(frozen=True)
class AdamWHyper:
    """Hyper-parameters of one update of one parameter group.

    ``step`` is the number of this update, 1 at the first. ``adam_w_mode`` is decoupled weight decay (AdamW). Without
    it the decay is added to the gradient (Adam with L2). Raises SlideConfigError for values outside their range.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int = 1
    bias_correction: bool = True
    adam_w_mode: bool = True

    def __post_init__(self) -> None:
        require_ranges(
            "lr, eps and weight_decay are finite and not negative, betas are two numbers in [0, 1), step counts from 1",
            ("lr", self.lr, 0.0 <= self.lr < math.inf),
            ("betas", self.betas, len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas)),
            ("eps", self.eps, 0.0 <= self.eps < math.inf),
            ("weight_decay", self.weight_decay, 0.0 <= self.weight_decay < math.inf),
            ("step", self.step, self.step >= 1),
        )

    @classmethod
    def from_param_group(cls, group: Mapping[str, Any], *, step: int, adam_w_mode: bool | None = None) -> AdamWHyper:
        """Return the hyper-parameters of ``group``, an element of ``optimizer.param_groups`` of Adam, AdamW, FusedAdam
        or DeepSpeedCPUAdam.

        ``adam_w_mode`` None means the group's own ``decoupled_weight_decay`` (torch >= 2.7), else AdamW. DeepSpeed's
        optimizers have an attribute ``adam_w_mode``: pass that.
        Raises SlideConfigError for a parameter that would change the result and is not supported.
        """
        refused = [name for name in _REFUSED if group.get(name)]
        if refused:
            raise SlideConfigError(
                f"optimizer parameter {refused[0]!r} is not supported by DS-Slide; set it to false "
                "or remove the key 'ds_slide' to train with stock DeepSpeed."
            )
        beta1, beta2 = group["betas"]
        if adam_w_mode is None:
            adam_w_mode = bool(group.get("decoupled_weight_decay", True))
        return cls(
            lr=float(group["lr"]),
            betas=(float(beta1), float(beta2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=int(step),
            bias_correction=bool(group.get("bias_correction", True)),
            adam_w_mode=bool(adam_w_mode),
        )

    @property
    def rule(self) -> UpdateRule:
        return ADAMW

    @property
    def kernel(self) -> str:
        return "adamw" if self.adam_w_mode else "adam"

    @property
    def two_passes(self) -> bool:
        return self.adam_w_mode

    def constants(self, grad_scale: float = 1.0) -> AdamWConstants:
        """Return the fp32 numbers of this step. ``grad_scale`` multiplies the gradient (clip factor / loss scale)."""
        beta1, beta2 = self.betas
        bc1 = 1.0 - beta1**self.step if self.bias_correction else 1.0
        bc2 = 1.0 - beta2**self.step if self.bias_correction else 1.0
        return AdamWConstants(
            grad_scale=fp32(grad_scale),
            decay=fp32(1.0 - self.lr * self.weight_decay),
            weight_decay=fp32(self.weight_decay),
            beta1=fp32(beta1),
            one_minus_beta1=fp32(1.0 - beta1),
            beta2=fp32(beta2),
            one_minus_beta2=fp32(1.0 - beta2),
            inv_bc2_sqrt=fp32(1.0 / math.sqrt(bc2)),
            step_size=fp32(self.lr / bc1),
            eps=fp32(self.eps),
        )


def _hyper_of(group: Mapping[str, Any], step: int, optimizer: Any) -> AdamWHyper:
    adam_w_mode = getattr(optimizer, "adam_w_mode", isinstance(optimizer, torch.optim.AdamW))
    return AdamWHyper.from_param_group(group, step=step, adam_w_mode=bool(adam_w_mode))


def _reference_step(
    hyper: AdamWHyper, c: AdamWConstants, w: torch.Tensor, g: torch.Tensor, states: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return the new weights and moments, with each operation rounded by itself. ``g`` already has its factor.

    AdamW:  w = (1 - lr * weight_decay) * w        Adam with L2:  g = g + weight_decay * w
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    w = w - lr / (1 - beta1^step) * m / (sqrt(v) * (1 / sqrt(1 - beta2^step)) + eps)
    """
    m, v = states
    if hyper.adam_w_mode:
        w = mul(w, c.decay)
    else:
        g = add(g, mul(w, c.weight_decay))
    m = add(mul(m, c.beta1), mul(g, c.one_minus_beta1))
    v = add(mul(v, c.beta2), mul(mul(g, g), c.one_minus_beta2))
    denominator = add(mul(sqrt(v), c.inv_bc2_sqrt), c.eps)
    return sub(w, mul(div(m, denominator), c.step_size)), (m, v)


def _gpu_step(elements: Elements, hyper: AdamWHyper, grad_scale: float) -> None:
    from ds_slide.kernels.offload.adamw_split import adamw_split_  # importing Triton takes a second

    weight, remainder, (exp_avg, exp_avg_sq), gradient, *_ = elements
    assert remainder is not None
    adamw_split_(weight, remainder, exp_avg, exp_avg_sq, gradient, hyper.constants(grad_scale), hyper.adam_w_mode)


def _problems(optimizer: Any) -> Iterator[str]:
    kind = type(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        if not _is_adam_group(group):
            yield (
                f"parameter group {index} of {kind.__name__} has eps {group.get('eps')!r} and betas "
                f"{group.get('betas')!r}, which are not Adam's (accelerate makes a DeepSpeedCPUAdam of any optimizer, "
                "such as Adafactor); set zero_force_ds_cpu_optimizer to false in the JSON to keep that optimizer, or "
                'use AdamW, which is optim="adamw_torch" in the Trainer'
            )
            return
        if kind is torch.optim.Adam and group.get("decoupled_weight_decay"):
            yield f"decoupled_weight_decay is true in parameter group {index} of Adam; use torch.optim.AdamW instead"
        yield from options_on(_REFUSED, group, index)


def _is_adam_group(group: Mapping[str, Any]) -> bool:
    betas = group.get("betas", (0.9, 0.999))
    numbers = [group.get("eps", 0.0), *(betas if isinstance(betas, tuple | list) and len(betas) == 2 else [None])]
    return all(isinstance(number, int | float | torch.Tensor) for number in numbers)


ADAMW = UpdateRule(
    name="AdamW",
    states=(StateSpec("exp_avg"), StateSpec("exp_avg_sq", signed=False)),
    state_dtypes=("fp32", "bf16", "8bit"),
    hyper_of=_hyper_of,
    reference_step=_reference_step,
    gpu_step=_gpu_step,
    problems=_problems,
    two_passes=True,
)
