"""One unit's tensors with difficult values, a step of any rule on them, and comparison bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_slide import _native
from ds_slide.optim.low_precision import STATE_FORMATS, from_fp32
from ds_slide.optim.reference import encode_split, reference_update_
from ds_slide.optim.rule import Elements, Hyper, Part

GRADIENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
WEIGHT_FORMATS = {"bf16_split": torch.bfloat16, "fp32": torch.float32, "fp16_master": torch.float16}
SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-40, 2.0**-126, -(2.0**-126), 3.4e38]
SEED = 0xFEDCBA9876543210


@dataclass
class Unit:
    """Weight, remainder, states and gradient of one update, each [numel], and the scales of states in 8 bits."""

    weight: torch.Tensor
    remainder: torch.Tensor | None
    states: list[torch.Tensor]
    grad: torch.Tensor
    scales: list[torch.Tensor] = field(default_factory=list)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Unit:
        remainder = None if self.remainder is None else change(self.remainder)
        states, scales = ([change(each) for each in tensors] for tensors in (self.states, self.scales))
        return Unit(change(self.weight), remainder, states, change(self.grad), scales)

    def clone(self) -> Unit:
        return self.map(torch.Tensor.clone)

    def chunk(self, start: int, stop: int) -> Unit:
        """Elements [start, stop), in place; `start` is a multiple of 64."""
        part = Unit(self.weight, self.remainder, self.states, self.grad).map(lambda each: each[start:stop])
        part.scales = [each[start // 64 : -(-stop // 64)] for each in self.scales]
        return part

    def elements(self, *, seed: int = 0, first: int = 0) -> Elements:
        return Elements(self.weight, self.remainder, self.states, self.grad, self.scales, seed, first)

    def written(self) -> list[torch.Tensor]:
        return [self.weight, *([] if self.remainder is None else [self.remainder]), *self.states, *self.scales]


def unit(
    hyper: Hyper,
    weight: torch.Tensor,
    states: list[torch.Tensor],
    grad: torch.Tensor,
    weight_format: str = "bf16_split",
    state_format: str = "fp32",
) -> Unit:
    """Of fp32 weights and states."""
    remainder = None
    if weight_format == "bf16_split":
        high, remainder = encode_split(weight)
        weight = high.view(torch.bfloat16)
    elif weight_format == "fp16_master":
        weight, remainder = weight.half(), weight.clone()
    dtype, specs = STATE_FORMATS[state_format].dtype, hyper.rule.states
    stored = [from_fp32(each, dtype, signed=of.signed) for each, of in zip(states, specs, strict=True)]
    scales = [scale for _, scale in stored if scale is not None]
    return Unit(weight.clone(), remainder, [state.clone() for state, _ in stored], grad, scales)


def random_unit(
    hyper: Hyper,
    numel: int,
    weight_format: str = "bf16_split",
    state_format: str = "fp32",
    grad: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Unit:
    """Runs of ordinary numbers and of numbers of every magnitude of fp32, subnormals included, some of both in one
    group of 64; a tenth are zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        values = torch.randn(numel, generator=generator)
        exponent = torch.randint(-149, 60, (numel,), generator=generator)
        wide = (values.double() * 2.0 ** exponent.double()).float()
        values = torch.where(torch.arange(numel) // 96 % 2 == 0, values, wide)
        return torch.where(torch.rand(numel, generator=generator) < 0.1, 0.0, values)

    states = [draw() * 0.1 if state.signed else draw().abs() * 0.01 for state in hyper.rule.states]
    return unit(hyper, draw(), states, draw().to(grad), weight_format, state_format)


def native(
    workers: _native.Workers,
    own: Unit,
    hyper: Hyper,
    grad_scale: float = 1.0,
    isa: str = "auto",
    first: int = 0,
    part: Part = "whole",
    **where: Any,
) -> None:
    """Nothing between the test and the binding checks the tensors. `where`: addresses of what is written beside `own`,
    or instead of it."""
    weight_format = next(name for name, dtype in WEIGHT_FORMATS.items() if dtype == own.weight.dtype)
    short = own.states[0].dtype if own.states else torch.float32
    call = _native.UpdateCall(
        hyper.kernel,
        weight_format,
        own.weight.data_ptr(),
        0 if own.remainder is None else own.remainder.data_ptr(),
        [state.data_ptr() for state in own.states],
        own.grad.data_ptr(),
        GRADIENTS[own.grad.dtype],
        own.weight.numel(),
        hyper.constants(grad_scale),
        isa,
        next(name for name, each in STATE_FORMATS.items() if each.dtype == short),
        [scale.data_ptr() for scale in own.scales],
        SEED,
        hyper.step,
        first,
        part,
        **where,
    )
    _native.update(workers, call)


def written_elsewhere(workers: _native.Workers, own: Unit, hyper: Hyper, grad_scale: float, isa: str) -> Unit:
    """What a step out of place leaves."""
    new = own.map(torch.zeros_like)
    native(
        workers,
        own,
        hyper,
        grad_scale,
        isa,
        part="out_of_place",
        new_weight_ptr=new.weight.data_ptr(),
        new_remainder_ptr=0 if new.remainder is None else new.remainder.data_ptr(),
        new_state_ptrs=[state.data_ptr() for state in new.states],
    )
    return new


def reference(own: Unit, hyper: Hyper, grad_scale: float = 1.0, *, first: int = 0, seed: int = SEED) -> None:
    reference_update_(own.elements(seed=seed, first=first), hyper, grad_scale)


def assert_same_bits(actual: Unit, expected: Unit) -> None:
    """Signs of zeros included; a NaN equals any NaN, since its payload is not specified."""
    for number, (got, want) in enumerate(zip(actual.written(), expected.written(), strict=True)):
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[want.element_size()]
        different = got.view(integer) != want.view(integer)
        if want.is_floating_point():
            different &= ~(got.isnan() & want.isnan())
        where = different.nonzero().flatten()
        assert not len(where), f"tensor {number} differs at {len(where)} places, first {where[0]}"
