"""Helpers of the update-rule tests: state buffers with difficult values, the kernels by name, comparison bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from ds_slide import _native
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.reference import encode_split

from .adamw_calls import adamw_reference_, native_adamw_

INSTRUCTION_SETS = ("portable", "avx2", "avx512")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class StateBuffers:
    """State of one update; every tensor [numel], at element ``offset`` of its allocation."""

    weight_format: str
    weight: torch.Tensor
    remainder: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor

    def clone(self, offset: int = 0) -> StateBuffers:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
            room[offset:] = tensor
            return room[offset:]

        remainder = None if self.remainder is None else moved(self.remainder)
        return StateBuffers(
            self.weight_format,
            moved(self.weight),
            remainder,
            moved(self.exp_avg),
            moved(self.exp_avg_sq),
            moved(self.grad),
        )

    def outputs(self) -> dict[str, torch.Tensor]:
        named = {"weight": self.weight, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return named if self.remainder is None else named | {"remainder": self.remainder}


def _wide(numel: int, generator: torch.Generator) -> torch.Tensor:
    """Numbers of every magnitude of fp32, subnormals included."""
    exponent = torch.randint(-149, 60, (numel,), generator=generator).double()
    return (torch.randn(numel, generator=generator).double() * 2.0**exponent).float()


@pytest.fixture(scope="session")
def make_state_buffers() -> Callable[..., StateBuffers]:
    def make(weight_format: str, grad_dtype: str, numel: int, *, wide: bool = False, seed: int = 0) -> StateBuffers:
        generator = torch.Generator().manual_seed(seed)
        draw = _wide if wide else lambda n, g: torch.randn(n, generator=g)
        master = draw(numel, generator)
        weight, remainder = master, None
        if weight_format == "bf16_split":
            hi, remainder = encode_split(master)
            weight = hi.view(torch.bfloat16)
        if weight_format == "fp16_master":
            weight, remainder = master.half(), master
        exp_avg = draw(numel, generator) * 0.1
        exp_avg_sq = draw(numel, generator).abs() * 0.01
        grad = draw(numel, generator).to(DTYPES[grad_dtype])
        return StateBuffers(weight_format, weight, remainder, exp_avg, exp_avg_sq, grad)

    return make


@pytest.fixture(scope="session")
def run_native() -> Callable[..., None]:
    def run(
        workers: _native.Workers,
        state_buffers: StateBuffers,
        hyper: AdamWHyper,
        grad_scale: float = 1.0,
        isa: str = "auto",
    ) -> None:
        p = state_buffers
        native_adamw_(workers, p.weight, p.remainder, p.exp_avg, p.exp_avg_sq, p.grad, hyper, grad_scale, isa)

    return run


@pytest.fixture(scope="session")
def run_reference() -> Callable[..., None]:
    def run(state_buffers: StateBuffers, hyper: AdamWHyper, grad_scale: float = 1.0) -> None:
        adamw_reference_(
            state_buffers.weight,
            state_buffers.remainder,
            state_buffers.exp_avg,
            state_buffers.exp_avg_sq,
            state_buffers.grad,
            hyper,
            grad_scale,
        )

    return run


@pytest.fixture(scope="session")
def assert_same_bits() -> Callable[[StateBuffers, StateBuffers], None]:
    """Equal bits, signs of zeros included; a NaN equals any NaN, since its payload is not specified."""

    def check(actual: StateBuffers, expected: StateBuffers) -> None:
        for name, want in expected.outputs().items():
            got = actual.outputs()[name]
            integer = {2: torch.int16, 4: torch.int32}[want.element_size()]
            different = got.view(integer) != want.view(integer)
            if want.is_floating_point():
                different &= ~(got.isnan() & want.isnan())
            where = different.nonzero().flatten()
            assert not len(where), (
                f"{name} differs at {len(where)} places, first {where[0]}: {got[where[0]]} is not {want[where[0]]}"
            )

    return check


@pytest.fixture(scope="session", params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> str:
    available = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(_native.isa()) + 1]
    if request.param not in available:
        pytest.skip(f"this processor has no {request.param}")
    return str(request.param)


@pytest.fixture(scope="session")
def workers() -> _native.Workers:
    return _native.Workers(2, [])
