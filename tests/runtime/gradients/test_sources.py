"""The two ways to collect a unit's gradients into its state buffer give the same bits and square sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from ds_slide.model.layout import ParameterInfo, build_layout
from ds_slide.runtime.gradients.norm import square_sum
from ds_slide.runtime.gradients.sources import Packed, collect, collect_by_torch, collect_in_one_pass
from ds_slide.runtime.unit import Unit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(3, 17), (64,), (5,), (2, 3, 11), (128,)]


def unit(unused: set[int], seed: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """What `collect` sees of a unit: a layout with gaps, and parameters with gradients, the last one frozen."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype, device=DEVICE)) for shape in SHAPES]
    infos = [
        ParameterInfo(str(index), shape, torch.Size(shape).numel(), None if index == len(SHAPES) - 1 else 0)
        for index, shape in enumerate(SHAPES)
    ]
    layout = build_layout(infos, world_size=1)
    for index, parameter in enumerate(parameters[:-1]):
        if index not in unused:
            # Whole numbers, whose sums bf16 holds: Triton's interpreter does not round to bf16 as GPUs do.
            gradient = torch.randint(-9, 9, parameter.shape[::-1], generator=generator).to(DEVICE, dtype)
            parameter.grad = gradient.permute(*reversed(range(gradient.dim())))  # not contiguous
    trainable = [(p, e) for p, e in zip(parameters, layout.entries, strict=True) if e.trainable]
    seen = SimpleNamespace(layout=layout, trainable=trainable, gradient_dtype=torch.bfloat16)
    seen.gradients = functools.partial(Unit.gradients, seen)
    return seen


@pytest.mark.parametrize("unused", [set(), {1}, {0, 3}, {0, 1, 2, 3}])
def test_bits_and_square_sum(unused: set[int]) -> None:
    state_buffer = torch.full((build_numel(),), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    expected = state_buffer.clone()
    for accumulate, seed in ((False, 1), (True, 2), (True, 3)):
        # Another parameter goes without in the second micro-batch.
        of_micro_batch = unit(unused if seed != 2 else {2}, seed)
        summed = collect_in_one_pass(of_micro_batch, state_buffer, accumulate=accumulate)
        collect_by_torch(of_micro_batch, expected, accumulate=accumulate)
        assert torch.equal(state_buffer.view(torch.int16), expected.view(torch.int16))
        torch.testing.assert_close(summed, square_sum(expected), rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("by", [collect_in_one_pass, collect_by_torch])
def test_gradients_in_fp32_are_rounded_before_they_are_added(by: Callable[..., object]) -> None:
    """2^-8 beside 1 is half a bf16 ulp, a tie that goes to the even 1: added in fp32, two of them would be seen."""
    state_buffer = torch.zeros(build_numel(), dtype=torch.float32, device=DEVICE)
    for accumulate in (False, True):
        micro_batch = unit(set(), 1, torch.float32)
        for parameter, _ in micro_batch.trainable:
            parameter.grad = torch.full_like(parameter, 1.0 + 2**-8)
        by(micro_batch, state_buffer, accumulate=accumulate)
    for _, entry in micro_batch.trainable:
        assert (state_buffer[entry.offset : entry.offset + entry.numel] == 2.0).all()


def build_numel() -> int:
    return unit(set(), 0).layout.trainable_numel


def test_collect_leaves_the_rest_of_a_staging_buffer_alone() -> None:
    numel = build_numel()
    state_buffer = torch.full((numel + 128,), 7.0, dtype=torch.bfloat16, device=DEVICE)
    summed = collect(unit({1}, 4), state_buffer, accumulate=False)
    assert (state_buffer[numel:] == 7).all()
    assert (summed is None) == (DEVICE == "cpu")
    found = Packed(None, state_buffer[:numel], summed).square_sum(square_sum)  # type: ignore[arg-type]
    torch.testing.assert_close(found, square_sum(state_buffer[:numel]), rtol=1e-13, atol=0.0)
