"""The norm that clipping needs: fp64, and the same bits however the work is divided."""

from __future__ import annotations

import math

import pytest
import torch

from ds_slide import _native
from ds_slide.optim.cpu import CpuUpdater

NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SEGMENT = 64 * 1024


def total(workers: _native.Workers, tensor: torch.Tensor, dtype: str, isa: str = "auto") -> float:
    return _native.sum_of_squares(workers, tensor.data_ptr(), dtype, tensor.numel(), isa)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, SEGMENT - 1, SEGMENT + 1, 5 * SEGMENT + 12345])
def test_beside_torch_in_fp64(isa, workers, dtype, numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(NAMES[dtype])
    expected = values.double().square().sum().item()
    actual = total(workers, values, dtype, isa)
    # Each square is exact in fp64; the sums round at most numel times by 2^-53, in some order.
    assert math.isclose(actual, expected, rel_tol=max(numel, 1) * 2.0**-52)
    assert actual == total(workers, values, dtype, "portable"), "every instruction set adds in the same order"


def test_the_number_of_threads_does_not_show():
    values = torch.randn(9 * SEGMENT + 777)
    sums = {total(_native.Workers(threads, []), values, "fp32") for threads in (1, 2, 3, 4)}
    assert len(sums) == 1


def test_squares_that_fp32_could_not_hold(isa, workers):
    for value in (1e30, 1e-30, 1e-40):
        values = torch.full((1000,), value)
        expected = 1000 * float(values[0]) ** 2
        assert math.isclose(total(workers, values, "fp32", isa), expected, rel_tol=1e-12) and expected > 0


@pytest.mark.parametrize("dtype", NAMES)
def test_infinity_and_nan_show_wherever_they_are(isa, workers, dtype):
    for position in (0, 17, SEGMENT - 1, SEGMENT + 40):
        values = torch.ones(SEGMENT + 41).to(NAMES[dtype])
        values[position] = -math.inf
        assert total(workers, values, dtype, isa) == math.inf
        values[position] = math.nan
        assert math.isnan(total(workers, values, dtype, isa))


def test_tensor_level_call():
    values = torch.randn(1000).bfloat16()
    expected = values.double().square().sum().item()
    assert math.isclose(CpuUpdater(2).sum_of_squares(values), expected, rel_tol=1e-12)
