"""Parameters that no micro-batch of a step has used: their gradient is zero, as in ZeRO-1 and 2.

So is that of unused experts in a leaf module of ZeRO-3. Other parameters of ZeRO-3 keep the last gradient that they had
in their partition of its buffer, which nothing clears, and are updated from it again. Torch's AdamW leaves them alone.
"""

from __future__ import annotations

import functools
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from harness import ADAMW, HYPER, ds_config
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

WIDTH = 32
USED = (True, False, False)
"""In which steps."""


class Optional(nn.Module):
    """Two blocks, and one more that only some inputs pass (an image encoder beside text)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if use:
            x = x + self.sometimes(x)
        return x.float().square().mean()


@functools.cache
def run(stage: int, slide: bool) -> list[dict[str, torch.Tensor]]:
    """Master and moments of the parameter after every step."""
    config: dict[str, Any] = ds_config({"blocks": ["blocks"]} if slide else None, clip=0.0)
    config["zero_optimization"] = {"stage": stage}
    if stage == 1:  # DeepSpeed's own AdamW for weights on the accelerator would be compiled for a minute
        config["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}
    model = Optional()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    generator, seen = torch.Generator().manual_seed(1), []
    for used in USED:
        engine.backward(engine(torch.randn(4, WIDTH, generator=generator).bfloat16(), used))
        engine.step()
        weight = model.sometimes.weight
        states = {"master": safe_get_full_fp32_param(weight).clone()}
        for key in ("exp_avg", "exp_avg_sq"):
            states[key] = safe_get_full_optimizer_state(weight, key).clone()
        seen.append(states)
    engine.destroy()
    return seen


def test_an_unused_parameter_has_a_gradient_of_zero() -> None:
    used, *rest = run(3, slide=True)
    assert used["exp_avg"].any()
    beta1, beta2 = HYPER.betas
    for steps, states in enumerate(rest, start=1):
        torch.testing.assert_close(states["exp_avg"], used["exp_avg"] * beta1**steps, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(states["exp_avg_sq"], used["exp_avg_sq"] * beta2**steps, rtol=1e-6, atol=0.0)
        assert not torch.equal(states["master"], used["master"])


def test_states_are_those_of_stage_1() -> None:
    for mine, stock in zip(run(3, slide=True), run(1, slide=False), strict=True):
        for key, value in stock.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-5, atol=1e-7)


def test_stage_3_of_stock_uses_the_last_gradient_again() -> None:
    """What README says of stock; when this fails, that is to be changed."""
    (mine, *_), (stock, again, _) = run(3, slide=True), run(3, slide=False)
    torch.testing.assert_close(mine["exp_avg"], stock["exp_avg"], rtol=1e-5, atol=1e-9)
    beta1 = HYPER.betas[0]
    gradient = stock["exp_avg"] / (1 - beta1)
    expected = beta1 * stock["exp_avg"] + (1 - beta1) * gradient
    torch.testing.assert_close(again["exp_avg"], expected, rtol=1e-5, atol=1e-9)
