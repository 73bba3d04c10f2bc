"""One step of AdamW with its states by name, by each implementation that runs on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ds_slide import _native
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.reference import reference_update_

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
WEIGHT_FORMATS = {torch.bfloat16: "bf16_split", torch.float32: "fp32", torch.float16: "fp16_master"}
STATE_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "8bit"}


def adamw_(
    update: Callable[..., None],
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    hyper: AdamWHyper,
    grad_scale: float = 1.0,
    *,
    exp_avg_scale: torch.Tensor | None = None,
    exp_avg_sq_scale: torch.Tensor | None = None,
    seed: int = 0,
    first: int = 0,
) -> None:
    """`update`: that of a `CpuUpdater`, or the reference."""
    scales = (exp_avg_scale, exp_avg_sq_scale)
    moments = (exp_avg, exp_avg_sq)
    update(weight, remainder, moments, grad, hyper, grad_scale, scales=scales, seed=seed, first=first)


adamw_reference_ = functools.partial(adamw_, reference_update_)


def updater_adamw_(updater: CpuUpdater, *arguments: Any, **named: Any) -> None:
    adamw_(updater.update_, *arguments, **named)


def native_adamw_(
    workers: _native.Workers,
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    hyper: AdamWHyper,
    grad_scale: float = 1.0,
    isa: str = "auto",
    *,
    exp_avg_scale: torch.Tensor | None = None,
    exp_avg_sq_scale: torch.Tensor | None = None,
    seed: int = 0,
    first: int = 0,
) -> None:
    """Nothing between the test and the binding checks the tensors."""
    state_format = STATE_FORMATS[exp_avg_sq.dtype]
    scales = [0 if scale is None else scale.data_ptr() for scale in (exp_avg_scale, exp_avg_sq_scale)]
    _native.update(
        workers,
        hyper.kernel,
        WEIGHT_FORMATS[weight.dtype],
        weight.data_ptr(),
        0 if remainder is None else remainder.data_ptr(),
        [exp_avg.data_ptr(), exp_avg_sq.data_ptr()],
        grad.data_ptr(),
        DTYPE_NAMES[grad.dtype],
        weight.numel(),
        hyper.constants(grad_scale),
        isa,
        state_format,
        scales if state_format == "8bit" else (),
        seed,
        hyper.step,
        first,
    )
