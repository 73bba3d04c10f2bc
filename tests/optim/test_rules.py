"""Lion and SGD: their GPU kernels have the bits of the reference, and the CPU's follow what is published."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.lion import LION, LionHyper
from ds_slide.optim.reference import decode_split
from ds_slide.optim.rule import Hyper
from ds_slide.optim.sgd import SGD, SGD_MOMENTUM, SgdHyper

from .test_bits import ADAMS, HYPERS
from .units import GRADIENTS, SPECIAL, Unit, assert_same_bits, random_unit, reference, unit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HYPERS = {name: hyper for name, hyper in HYPERS.items() if name not in ADAMS}  # AdamW's: tests/kernels/offload

by_hyper = pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.by_turns(3)
@pytest.mark.parametrize("grad", GRADIENTS, ids=GRADIENTS.values())
@by_hyper
def test_the_gpu_kernel_has_the_bits_of_the_reference(hyper: Hyper, grad: torch.dtype) -> None:
    for numel in (1, 16, 2 * 1024 + 3):
        generator = torch.Generator().manual_seed(numel)
        weight, states, gradient = (
            torch.randn(numel, generator=generator) * torch.logspace(-30, 2, numel) for _ in range(3)
        )
        states[::5] = 0
        gradient[::5] = 0
        expected = unit(hyper, weight, alike(states, hyper), gradient.to(grad)).map(on_device)
        actual = expected.clone()
        for _ in range(2):
            gpu_step(actual, hyper, 0.37)
            reference(expected, hyper, 0.37)
        assert_same_bits(actual, expected)


def alike(values: torch.Tensor, hyper: Hyper) -> list[torch.Tensor]:
    return [values for _ in hyper.rule.states]


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE)


def gpu_step(own: Unit, hyper: Hyper, grad_scale: float) -> None:
    assert own.remainder is not None
    hyper.rule.gpu_step(own.elements(), hyper, grad_scale)


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize("name", ["lion", "sgd", "sgd_nesterov"])
def test_the_gpu_kernel_keeps_what_is_no_number(name: str) -> None:
    hyper, values = HYPERS[name], torch.tensor(SPECIAL).repeat(9)
    ones = torch.ones_like(values)
    for weight, grad in ((values, ones), (ones, values)):
        expected = unit(hyper, weight, alike(ones, hyper), grad).map(on_device)
        actual = expected.clone()
        gpu_step(actual, hyper, 1.0)
        reference(expected, hyper)
        assert torch.equal(actual.weight.isnan(), expected.weight.isnan())
        numbers = ~expected.weight.isnan()
        assert torch.equal(actual.weight[numbers], expected.weight[numbers])


STEPS, NUMEL = 200, 5000


def published_lion(
    w: torch.Tensor, m: torch.Tensor, g: torch.Tensor, lr: float, b1: float, b2: float, wd: float
) -> None:
    """Algorithm 2 of arXiv 2302.06675, in fp32: update = sign(b1 m + (1 - b1) g); w -= lr (update + wd w)."""
    update = (m * b1 + g * (1 - b1)).sign()
    w.sub_(lr * (update + wd * w))
    m.mul_(b2).add_(g, alpha=1 - b2)


@pytest.mark.parametrize("split", [True, False], ids=["split", "fp32"])
def test_two_hundred_steps_beside_the_published_lion(split: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(NUMEL, generator=generator)
    lr, betas, decay = 1e-3, (0.9, 0.99), 0.1
    own = unit(HYPERS["lion"], start, [torch.zeros(NUMEL)], start, "bf16_split" if split else "fp32")
    expected, momentum = start.clone(), torch.zeros(NUMEL)
    for step in range(1, STEPS + 1):
        own.grad = torch.randn(NUMEL, generator=generator) + start
        own.grad[: NUMEL // 10] = 0  # never a gradient: these shrink and do not move
        CpuUpdater(2).update_(own.elements(), LionHyper(lr, betas, decay, step))
        published_lion(expected, momentum, own.grad, lr, *betas, decay)
    weight = decode_split(own.weight, own.remainder) if own.remainder is not None else own.weight
    # Two roundings of a weight below 5 a step each. A sign that turned out otherwise would be 2e-3 away; the sums of
    # b1 m and (1 - b1) g agree to a rounding, so it could only where they cancel to 1e-7 of each.
    assert (weight - expected).abs().max() < STEPS * 4 * 5 * 2.0**-24
    torch.testing.assert_close(own.states[0], momentum, rtol=1e-5, atol=1e-6)
    assert not own.states[0][: NUMEL // 10].any()


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("split", [True, False], ids=["split", "fp32"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.05},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.05},
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05},
    ],
    ids=str,
)
def test_two_hundred_steps_beside_torch_sgd(split: bool, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(NUMEL, generator=generator)
    expected = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([expected], lr=0.01, **options)
    hyper = SgdHyper(lr=0.01, keeps_momentum="momentum" in options, **options)
    own = unit(hyper, start, alike(torch.zeros(NUMEL), hyper), start, "bf16_split" if split else "fp32")
    for step in range(1, STEPS + 1):
        own.grad = torch.randn(NUMEL, generator=generator) + start
        expected.grad = own.grad.clone()
        CpuUpdater(2).update_(own.elements(), dataclasses.replace(hyper, step=step))
        optimizer.step()
    weight = decode_split(own.weight, own.remainder) if own.remainder is not None else own.weight
    # A rounding of the weight and three of an update below 0.5 a step in either implementation.
    assert (weight - expected.detach()).abs().max() < STEPS * 2 * (20 + 4) * 2.0**-24
    if own.states:
        torch.testing.assert_close(own.states[0], optimizer.state[expected]["momentum_buffer"], rtol=1e-5, atol=1e-5)


def test_hypers_come_from_the_groups() -> None:
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    group = torch.optim.SGD(parameter, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.1).param_groups[0]
    assert SGD_MOMENTUM.hyper_of(group, 7, None) == SgdHyper(0.2, 0.9, 0.0, 0.1, True, 7)
    plain = torch.optim.SGD(parameter, lr=0.2).param_groups[0]
    assert SGD.hyper_of(plain, 1, None) == SgdHyper(0.2, keeps_momentum=False)
    with pytest.raises(SlideConfigError, match=r"momentum' is 0\.9, but it was 0 in all parameter groups"):
        SGD.hyper_of(plain | {"momentum": 0.9}, 1, None)
    lion = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0}
    assert LION.hyper_of(lion, 3, None) == LionHyper(1e-4, (0.9, 0.95), 0.0, 3)


@pytest.mark.parametrize("values", [{"lr": -1.0}, {"lr": float("nan")}, {"weight_decay": -1.0}, {"step": 0}], ids=str)
@pytest.mark.parametrize("kind", [LionHyper, SgdHyper])
def test_values_outside_their_range(kind: Any, values: dict[str, Any]) -> None:
    with pytest.raises(SlideConfigError, match=f"'{next(iter(values))}'"):
        kind(**({"lr": 1e-3} | values))
    with pytest.raises(SlideConfigError, match="'betas'"):
        LionHyper(lr=1e-3, betas=(0.9, 1.0))


def test_short_states_are_refused() -> None:
    own = random_unit(HYPERS["lion"], 64)
    own.states = [state.bfloat16() for state in own.states]
    with pytest.raises(ValueError, match="keeps its states in fp32 only"):
        CpuUpdater(1).update_(own.elements(), HYPERS["lion"])
    with pytest.raises(SlideError, match=r"exp_avg is torch\.float64; use float32"):
        CpuUpdater(1).update_(own.elements()._replace(states=[own.states[0].double()]), HYPERS["lion"])
