"""Hyper-parameters: where they come from, what is refused, and the numbers derived from them."""

from __future__ import annotations

import math

import pytest
import torch

from ds_slide.errors import SlideError
from ds_slide.optim.adamw import AdamWHyper

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def group_of(optimizer_class: type[torch.optim.Optimizer], **options: object) -> dict:
    return optimizer_class([torch.nn.Parameter(torch.zeros(1))], **options).param_groups[0]


def test_taken_from_a_torch_group():
    group = group_of(torch.optim.AdamW, lr=2e-4, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    hyper = AdamWHyper.from_param_group(group, step=5)
    assert hyper == AdamWHyper(lr=2e-4, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, step=5)
    assert not AdamWHyper.from_param_group(group, step=1, adam_w_mode=False).adam_w_mode


def test_taken_from_a_deepspeed_group():
    group = {
        "lr": 1e-3,
        "betas": [0.9, 0.99],
        "eps": 1e-8,
        "weight_decay": 0,
        "bias_correction": False,
        "amsgrad": False,
    }
    hyper = AdamWHyper.from_param_group(group, step=1, adam_w_mode=True)
    assert hyper == AdamWHyper(lr=1e-3, betas=(0.9, 0.99), bias_correction=False)


@pytest.mark.parametrize("name", ["amsgrad", "maximize", "differentiable"])
def test_refused_by_name(name):
    group = group_of(torch.optim.AdamW) | {name: True}
    with pytest.raises(SlideError, match=name):
        AdamWHyper.from_param_group(group, step=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -1e-3), ("lr", math.nan), ("betas", (0.9, 1.0)), ("betas", (-0.1, 0.9)), ("eps", -1.0), ("step", 0)],
)
def test_values_outside_their_range(name, value):
    with pytest.raises(SlideError, match=f"'{name}'"):
        AdamWHyper(**({"lr": 1e-3} | {name: value}))


def test_constants_are_fp32_rounded_once():
    hyper = AdamWHyper(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=3)
    constants = hyper.constants(grad_scale=1 / 3)
    expected = {
        "decay": 1 - 1e-4,
        "one_minus_beta1": 0.1,
        "one_minus_beta2": 1 - 0.999,
        "inv_bc2_sqrt": 1 / math.sqrt(1 - 0.999**3),
        "step_size": 1e-3 / (1 - 0.9**3),
        "grad_scale": 1 / 3,
    }
    for name, value in expected.items():
        assert getattr(constants, name) == torch.tensor(value, dtype=torch.float64).float().item(), name


def test_without_bias_correction_the_step_does_not_show():
    options = {"lr": 1e-3, "bias_correction": False}
    assert AdamWHyper(**options, step=1).constants() == AdamWHyper(**options, step=900).constants()
    assert AdamWHyper(**options).constants().inv_bc2_sqrt == 1.0


def test_subnormal_constants_are_zero():
    assert AdamWHyper(lr=SMALLEST_NORMAL / 2, bias_correction=False).constants().step_size == 0.0
    assert AdamWHyper(lr=SMALLEST_NORMAL, bias_correction=False).constants().step_size == SMALLEST_NORMAL
