"""Lion and SGD: CPU kernels, GPU kernel and torch reference give the same bits, and follow what is published."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_slide import _native
from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.lion import LION, LionHyper
from ds_slide.optim.reference import decode_split, encode_split, reference_update_
from ds_slide.optim.rule import Hyper
from ds_slide.optim.sgd import SGD, SGD_MOMENTUM, SgdHyper

from .adamw_calls import DTYPE_NAMES, WEIGHT_FORMATS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HYPERS: dict[str, Hyper] = {
    "lion": LionHyper(lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, step=4),
    "lion_bare": LionHyper(lr=1e-4, betas=(0.0, 0.5)),
    "sgd": SgdHyper(lr=0.1, weight_decay=0.01, keeps_momentum=False),
    "sgd_momentum": SgdHyper(lr=0.1, momentum=0.9, weight_decay=0.01, step=1),
    "sgd_dampened": SgdHyper(lr=0.1, momentum=0.9, dampening=0.3, step=2),
    "sgd_nesterov": SgdHyper(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, step=3),
    "sgd_group_without": SgdHyper(lr=0.1, step=5),
}
SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-40, 2.0**-126, -(2.0**-126), 3.4e38]

by_hyper = pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)


@dataclasses.dataclass
class Unit:
    """Weight, remainder, states and gradient of one update, each [numel]."""

    weight: torch.Tensor
    remainder: torch.Tensor | None
    states: list[torch.Tensor]
    grad: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Unit:
        remainder = None if self.remainder is None else change(self.remainder)
        return Unit(change(self.weight), remainder, [change(state) for state in self.states], change(self.grad))

    def arguments(self) -> tuple[Any, ...]:
        return self.weight, self.remainder, self.states, self.grad

    def written(self) -> list[torch.Tensor]:
        return [self.weight, *([] if self.remainder is None else [self.remainder]), *self.states]


def unit(hyper: Hyper, weight: torch.Tensor, states: torch.Tensor, grad: torch.Tensor, weight_format: str) -> Unit:
    """Of fp32 values, which each state starts at."""
    remainder = None
    if weight_format == "bf16_split":
        high, remainder = encode_split(weight)
        weight = high.view(torch.bfloat16)
    elif weight_format == "fp16_master":
        weight, remainder = weight.half(), weight.clone()
    return Unit(weight.clone(), remainder, [states.clone() for _ in hyper.rule.states], grad)


def wide(numel: int, generator: torch.Generator) -> torch.Tensor:
    """Numbers of every magnitude of fp32, subnormals included."""
    exponent = torch.randint(-149, 60, (numel,), generator=generator).double()
    return (torch.randn(numel, generator=generator).double() * 2.0**exponent).float()


def random_unit(
    hyper: Hyper, numel: int, weight_format: str = "bf16_split", grad: torch.dtype = torch.bfloat16, seed: int = 0
) -> Unit:
    """Half of ordinary numbers, half of wide ones; some gradients and states are zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        values = torch.randn(numel, generator=generator)
        values[1::2] = wide(numel, generator)[1::2]
        return torch.where(torch.rand(numel, generator=generator) < 0.1, 0.0, values)

    return unit(hyper, draw(), draw(), draw().to(grad), weight_format)


def native(workers: _native.Workers, own: Unit, hyper: Hyper, grad_scale: float, isa: str) -> None:
    _native.update(
        workers,
        hyper.kernel,
        WEIGHT_FORMATS[own.weight.dtype],
        own.weight.data_ptr(),
        0 if own.remainder is None else own.remainder.data_ptr(),
        [state.data_ptr() for state in own.states],
        own.grad.data_ptr(),
        DTYPE_NAMES[own.grad.dtype],
        own.weight.numel(),
        hyper.constants(grad_scale),
        isa,
    )


def assert_same_bits(actual: Unit, expected: Unit) -> None:
    """Signs of zeros included; a NaN equals any NaN."""
    for number, (got, want) in enumerate(zip(actual.written(), expected.written(), strict=True)):
        integer = {2: torch.int16, 4: torch.int32}[want.element_size()]
        different = got.view(integer) != want.view(integer)
        if want.is_floating_point():
            different &= ~(got.isnan() & want.isnan())
        where = different.nonzero().flatten()
        assert not len(where), f"tensor {number} differs at {len(where)} places, first {where[0]}"


@by_hyper
def test_bits_of_the_reference_in_every_format(isa: str, workers: _native.Workers, hyper: Hyper) -> None:
    formats = itertools.product(("bf16_split", "fp32", "fp16_master"), DTYPE_NAMES)
    for seed, (weight_format, grad) in enumerate(formats):
        actual = random_unit(hyper, 16384 + 77, weight_format, grad, seed)
        expected = actual.map(torch.Tensor.clone)
        for _ in range(3):
            native(workers, actual, hyper, 0.37, isa)
            reference_update_(*expected.arguments(), hyper, 0.37)
        assert_same_bits(actual, expected)


@by_hyper
def test_any_size_and_alignment(isa: str, workers: _native.Workers, hyper: Hyper) -> None:
    for numel in (0, 1, 7, 8, 15, 16, 17, 33):
        expected = random_unit(hyper, numel)
        actual = expected.map(lambda state_buffer: torch.cat([state_buffer[:0].new_zeros(1), state_buffer])[1:])
        native(workers, actual, hyper, 1.0, isa)
        reference_update_(*expected.arguments(), hyper, 1.0)
        assert_same_bits(actual, expected)


@by_hyper
@pytest.mark.parametrize("where", ["weight", "state", "grad"])
def test_nan_infinity_zero_and_subnormals(isa: str, workers: _native.Workers, hyper: Hyper, where: str) -> None:
    values, ones = torch.tensor(SPECIAL).repeat(9), torch.ones(9 * len(SPECIAL))
    parts = [values if name == where else ones for name in ("weight", "state", "grad")]
    for weight_format in ("bf16_split", "fp32", "fp16_master"):
        actual = unit(hyper, *parts, weight_format)
        expected = actual.map(torch.Tensor.clone)
        native(workers, actual, hyper, 1.0, isa)
        reference_update_(*expected.arguments(), hyper, 1.0)
        assert_same_bits(actual, expected)
    assert actual.weight.isnan()[:: len(SPECIAL)].all() or (where == "state" and not hyper.rule.states)


@by_hyper
def test_threads_and_pieces_change_nothing(hyper: Hyper) -> None:
    whole = random_unit(hyper, 3 * 16384 + 5)
    for threads in (1, 3):
        actual = whole.map(torch.Tensor.clone)
        CpuUpdater(threads).update_(*actual.arguments(), hyper, 0.5)
        pieces = whole.map(torch.Tensor.clone)
        for start, stop in itertools.pairwise([0, 64, 20032, 3 * 16384 + 5]):
            part = pieces.map(lambda state_buffer, span=slice(start, stop): state_buffer[span])
            CpuUpdater(threads).update_(*part.arguments(), hyper, 0.5)
        assert_same_bits(pieces, actual)
        reference = whole.map(torch.Tensor.clone)
        reference_update_(*reference.arguments(), hyper, 0.5)
        assert_same_bits(actual, reference)


@pytest.mark.usefixtures("quick_interpreter")
@by_hyper
@pytest.mark.parametrize("grad", DTYPE_NAMES, ids=DTYPE_NAMES.values())
def test_the_gpu_kernel_has_the_bits_of_the_reference(hyper: Hyper, grad: torch.dtype) -> None:
    for numel in (1, 16, 2 * 1024 + 3):
        generator = torch.Generator().manual_seed(numel)
        state_buffers = (torch.randn(numel, generator=generator) * torch.logspace(-30, 2, numel) for _ in range(3))
        weight, states, gradient = state_buffers
        states[::5] = 0
        gradient[::5] = 0
        expected = unit(hyper, weight, states, gradient.to(grad), "bf16_split").map(
            lambda state_buffer: state_buffer.to(DEVICE)
        )
        actual = expected.map(torch.Tensor.clone)
        for _ in range(2):
            assert actual.remainder is not None
            hyper.rule.gpu_step(actual.weight, actual.remainder, actual.states, actual.grad, hyper, 0.37)
            reference_update_(*expected.arguments(), hyper, 0.37)
        assert_same_bits(actual, expected)


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize(
    "hyper", [HYPERS["lion"], HYPERS["sgd"], HYPERS["sgd_nesterov"]], ids=["lion", "sgd", "nesterov"]
)
def test_the_gpu_kernel_keeps_what_is_no_number(hyper: Hyper) -> None:
    values = torch.tensor(SPECIAL).repeat(9)
    for parts in (
        (values, torch.ones_like(values), torch.ones_like(values)),
        (torch.ones_like(values), torch.ones_like(values), values),
    ):
        expected = unit(hyper, *parts, "bf16_split").map(lambda state_buffer: state_buffer.to(DEVICE))
        actual = expected.map(torch.Tensor.clone)
        assert actual.remainder is not None
        hyper.rule.gpu_step(actual.weight, actual.remainder, actual.states, actual.grad, hyper, 1.0)
        reference_update_(*expected.arguments(), hyper, 1.0)
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
    own = unit(HYPERS["lion"], start, torch.zeros(NUMEL), start, "bf16_split" if split else "fp32")
    expected, momentum = start.clone(), torch.zeros(NUMEL)
    for step in range(1, STEPS + 1):
        own.grad = torch.randn(NUMEL, generator=generator) + start
        own.grad[: NUMEL // 10] = 0  # never a gradient: these shrink and do not move
        CpuUpdater(2).update_(*own.arguments(), LionHyper(lr, betas, decay, step))
        published_lion(expected, momentum, own.grad, lr, *betas, decay)
    weight = decode_split(own.weight, own.remainder) if own.remainder is not None else own.weight
    # Two roundings of a weight below 5 a step each. A sign that turned out otherwise would be 2e-3 away; the sums of
    # b1 m and (1 - b1) g agree to a rounding, so it could only where they cancel to 1e-7 of each.
    assert (weight - expected).abs().max() < STEPS * 4 * 5 * 2.0**-24
    torch.testing.assert_close(own.states[0], momentum, rtol=1e-5, atol=1e-6)
    assert not own.states[0][: NUMEL // 10].any()


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
    own = unit(hyper, start, torch.zeros(NUMEL), start, "bf16_split" if split else "fp32")
    for step in range(1, STEPS + 1):
        own.grad = torch.randn(NUMEL, generator=generator) + start
        expected.grad = own.grad.clone()
        CpuUpdater(2).update_(*own.arguments(), dataclasses.replace(hyper, step=step))
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
        CpuUpdater(1).update_(*own.arguments(), HYPERS["lion"])
    with pytest.raises(SlideError, match=r"exp_avg is torch\.float64; use float32"):
        CpuUpdater(1).update_(own.weight, own.remainder, [own.states[0].double()], own.grad, HYPERS["lion"])
