"""Hyper-parameters of one Adam(W) step, and the fp32 numbers that every implementation of it uses."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_slide.errors import SlideConfigError

_FP32_MIN_NORMAL = 2.0**-126
# Parameters of torch's Adam that change the result and that DS-Slide does not have.
_REFUSED = ("amsgrad", "maximize", "differentiable")


@dataclass(frozen=True)
class AdamWConstants:
    """One step's numbers: computed in double, rounded once to fp32, subnormals set to zero.

    The C++ kernels, the torch reference and the GPU kernel all start from these, so that their bits agree.
    """

    decay: float
    weight_decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inv_bc2_sqrt: float
    step_size: float
    eps: float
    grad_scale: float
    adam_w_mode: bool


@dataclass(frozen=True)
class AdamWHyper:
    """Hyper-parameters of one update of one parameter group.

    ``step`` is the number of this update, 1 at the first. ``adam_w_mode`` is decoupled weight decay (AdamW); without
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
        for name, value, valid in (
            ("lr", self.lr, 0.0 <= self.lr < math.inf),
            ("betas", self.betas, len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas)),
            ("eps", self.eps, 0.0 <= self.eps < math.inf),
            ("weight_decay", self.weight_decay, 0.0 <= self.weight_decay < math.inf),
            ("step", self.step, self.step >= 1),
        ):
            if not valid:
                raise SlideConfigError(
                    f"optimizer parameter {name!r} is {value}, which is outside its range; "
                    "lr, eps and weight_decay are finite and not negative, betas are two numbers in [0, 1), "
                    "step counts from 1."
                )

    @classmethod
    def from_param_group(cls, group: Mapping[str, Any], *, step: int, adam_w_mode: bool | None = None) -> AdamWHyper:
        """Hyper-parameters of ``group``, an element of ``optimizer.param_groups`` of Adam, AdamW, FusedAdam or
        DeepSpeedCPUAdam.

        ``adam_w_mode`` None takes the group's own ``decoupled_weight_decay`` (torch >= 2.7), else AdamW. DeepSpeed's
        optimizers keep it as the attribute ``adam_w_mode`` of the optimizer: pass that.
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

    def constants(self, grad_scale: float = 1.0) -> AdamWConstants:
        """The fp32 numbers of this step; ``grad_scale`` multiplies the gradient (clip factor / loss scale)."""
        beta1, beta2 = self.betas
        bc1 = 1.0 - beta1**self.step if self.bias_correction else 1.0
        bc2 = 1.0 - beta2**self.step if self.bias_correction else 1.0
        return AdamWConstants(
            decay=_fp32(1.0 - self.lr * self.weight_decay),
            weight_decay=_fp32(self.weight_decay),
            beta1=_fp32(beta1),
            one_minus_beta1=_fp32(1.0 - beta1),
            beta2=_fp32(beta2),
            one_minus_beta2=_fp32(1.0 - beta2),
            inv_bc2_sqrt=_fp32(1.0 / math.sqrt(bc2)),
            step_size=_fp32(self.lr / bc1),
            eps=_fp32(self.eps),
            grad_scale=_fp32(grad_scale),
            adam_w_mode=self.adam_w_mode,
        )


def _fp32(value: float) -> float:
    rounded = ctypes.c_float(value).value
    return math.copysign(0.0, rounded) if abs(rounded) < _FP32_MIN_NORMAL else rounded
