"""100 steps beside torch.optim.AdamW and Adam in fp32."""

from __future__ import annotations

import pytest
import torch

from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.reference import decode_split, encode_split
from ds_slide.optim.rule import Elements

STEPS = 100
NUMEL = 20000
LR = 2e-3
EPSILON = 2.0**-24  # half an ulp of 1.0 in fp32: one rounding


def tolerance(weight: torch.Tensor) -> torch.Tensor:
    """What two correct fp32 implementations may differ by after STEPS steps, element by element.

    A step rounds the weight twice (decay and subtraction): 2 roundings of |w| each in either implementation. The
    update is at most about lr in size (|m| / sqrt(v) is near or below 1 here) and goes through some 12 roundings
    beside the ones torch fuses or orders differently, also in m and v, whose errors decay with beta: within
    64 roundings of lr.
    """
    return STEPS * EPSILON * (4 * weight.abs() + 64 * LR)


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "fp32"])
def test_hundred_steps_beside_torch(adam_w_mode: bool, split: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(NUMEL, generator=generator)
    expected = torch.nn.Parameter(start.clone())
    optimizer_class = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    optimizer = optimizer_class([expected], lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    weight, remainder = start.clone(), None
    if split:
        hi, remainder = encode_split(start)
        weight = hi.view(torch.bfloat16)
    exp_avg, exp_avg_sq = torch.zeros(NUMEL), torch.zeros(NUMEL)
    updater = CpuUpdater(2)
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = LR * (1 - step / (2 * STEPS))  # as under a scheduler
        grad = torch.randn(NUMEL, generator=generator).bfloat16()
        expected.grad = grad.float()
        optimizer.step()
        hyper = AdamWHyper.from_param_group(optimizer.param_groups[0], step=step, adam_w_mode=adam_w_mode)
        updater.update_(Elements(weight, remainder, (exp_avg, exp_avg_sq), grad), hyper)

    master = decode_split(weight, remainder) if split else weight
    assert ((start - master).abs() > 10 * tolerance(master)).float().mean() > 0.9, "the weights must have moved"
    error = (master.double() - expected.double()).abs()
    assert (error <= tolerance(master)).all(), f"largest error {error.max().item():.3g}"
    state = optimizer.state[expected]
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=1e-5, atol=1e-7)
