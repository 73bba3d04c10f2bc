"""The weights and then the states, from the same gradient, leave the bits of a whole step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_slide.optim.hyper import AdamWHyper

from ds_slide import _native
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.lion import LionHyper
from ds_slide.optim.low_precision import STATE_FORMATS, from_fp32
from ds_slide.optim.reference import encode_split
from ds_slide.optim.rule import Hyper
from ds_slide.optim.sgd import SgdHyper

NUMEL = 2 * 16384 + 77  # slices of several threads, and a last vector and a last group that are not full
ADAMW = AdamWHyper(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=7)
LION = LionHyper(lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, step=4)


def wide(generator: torch.Generator) -> torch.Tensor:
    """Numbers of every magnitude of fp32, with NaN and infinity."""
    exponent = torch.randint(-140, 100, (NUMEL,), generator=generator).double()
    values = (torch.randn(NUMEL, generator=generator).double() * 2.0**exponent).float()
    values[::1009], values[5::2003] = torch.nan, torch.inf
    return values


def arrays(
    hyper: Hyper, weight_format: str, state: str
) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor], list[torch.Tensor | None], torch.Tensor]:
    """(weight, remainder, states, their scales, gradient)."""
    generator = torch.Generator().manual_seed(1)
    master, remainder = wide(generator), None
    weight = master.clone()
    if weight_format == "bf16_split":
        high, remainder = encode_split(master)
        weight = high.view(torch.bfloat16)
    elif weight_format == "fp16_master":
        weight, remainder = master.half(), master
    dtype = STATE_FORMATS[state].dtype
    stored = [
        from_fp32(values if spec.signed else values.abs(), dtype, signed=spec.signed)
        for spec in hyper.rule.states
        for values in [torch.randn(NUMEL, generator=generator)]
    ]
    return weight, remainder, [s for s, _ in stored], [scale for _, scale in stored], wide(generator)


@pytest.mark.parametrize("weight_format", ["bf16_split", "fp32", "fp16_master"])
@pytest.mark.parametrize(
    ("hyper", "state"), [(ADAMW, "fp32"), (ADAMW, "bf16"), (ADAMW, "8bit"), (LION, "fp32")], ids=str
)
def test_two_passes_leave_the_bits_of_one(hyper: Hyper, state: str, weight_format: str) -> None:
    updater = CpuUpdater(2)
    for grad_dtype in (torch.bfloat16, torch.float16, torch.float32):
        found, expected = (arrays(hyper, weight_format, state) for _ in range(2))

        def step(of: tuple, part: str) -> None:
            weight, remainder, states, scales, grad = of
            gradient = grad.to(grad_dtype)  # noqa: B023
            updater.update_(
                weight, remainder, states, gradient, hyper, 0.37, scales=scales, seed=3, first=640, part=part
            )

        step(expected, "whole")
        before = [each.clone() for each in found[2]]
        step(found, "weights")
        same = [torch.equal(bits(a), bits(b)) for a, b in zip(found[2], before, strict=True)]
        assert all(same), "the first pass has written a state"
        assert torch.equal(bits(found[0]), bits(expected[0]))
        step(found, "states")
        for a, b in zip(flat(found), flat(expected), strict=True):
            assert torch.equal(bits(a), bits(b))


def flat(of: tuple) -> list[torch.Tensor]:
    weight, remainder, states, scales, _ = of
    return [each for each in (weight, remainder, *states, *scales) if each is not None]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def test_every_instruction_set_has_the_passes(isa: str, workers: _native.Workers) -> None:
    def stepped(name: str, *parts: Any) -> list[torch.Tensor]:
        weight, remainder, states, _, grad = arrays(ADAMW, "bf16_split", "fp32")
        assert remainder is not None
        gradient, pointers = grad.bfloat16(), [each.data_ptr() for each in (weight, remainder, *states)]
        for part in parts:
            _native.update(
                workers,
                ADAMW.kernel,
                "bf16_split",
                *pointers[:2],
                pointers[2:],
                gradient.data_ptr(),
                "bf16",
                NUMEL,
                ADAMW.constants(0.37),
                isa=name,
                part=part,
            )
        return [each.nan_to_num() for each in (weight, remainder, *states)]

    for found, expected in zip(stepped(isa, "weights", "states"), stepped("portable", "whole"), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "hyper", [AdamWHyper(lr=1e-3, weight_decay=0.1, adam_w_mode=False), SgdHyper(lr=0.1, momentum=0.9)], ids=str
)
def test_rules_whose_states_need_the_old_weight_have_none(hyper: Hyper) -> None:
    assert not hyper.two_passes
    weight, remainder, states, scales, grad = arrays(hyper, "bf16_split", "fp32")
    with pytest.raises(ValueError, match="has no two passes"):
        CpuUpdater(1).update_(weight, remainder, states, grad, hyper, scales=scales, part="weights")
