"""The tensor-level calls and what they refuse."""

from __future__ import annotations

import pytest
import torch

from ds_slide.errors import SlideError
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.rule import Elements

HYPER = AdamWHyper(lr=1e-2, weight_decay=0.1, step=2)


@pytest.fixture(scope="module")
def updater() -> CpuUpdater:
    return CpuUpdater(2)


def test_accumulate(updater):
    dst, src = torch.randn(3, 700).bfloat16(), torch.randn(3, 700)
    expected = (dst.float() + src).bfloat16()
    updater.accumulate_(dst, src)
    assert torch.equal(dst, expected)


def test_num_threads(updater):
    assert updater.num_threads == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"remainder": None}, "no weight format"),
        ({"weight": torch.zeros(8)}, "no weight format"),
        ({"exp_avg": torch.zeros(8).bfloat16()}, "exp_avg is torch.bfloat16 but must be torch.float32"),
        ({"exp_avg_sq": torch.zeros(7)}, "exp_avg_sq has 7 elements"),
        ({"grad": torch.zeros(8, dtype=torch.float64)}, "grad is torch.float64"),
        ({"grad": torch.zeros(8, 2)[:, 0]}, "grad is not a contiguous CPU tensor"),
        ({"weight": torch.zeros(8, dtype=torch.bfloat16, device="meta")}, "weight is not a contiguous CPU tensor"),
    ],
)
def test_wrong_tensors_are_named(updater, change, words):
    tensors = {
        "weight": torch.zeros(8, dtype=torch.bfloat16),
        "remainder": torch.zeros(8, dtype=torch.int16),
        "exp_avg": torch.zeros(8),
        "exp_avg_sq": torch.zeros(8),
        "grad": torch.zeros(8),
    }
    tensors |= change
    moments = [tensors.pop("exp_avg"), tensors.pop("exp_avg_sq")]
    with pytest.raises(SlideError, match=words):
        updater.update_(Elements(**tensors, states=moments), HYPER)


def test_accumulate_refuses_other_dtypes(updater):
    with pytest.raises(SlideError, match=r"src is torch\.int32"):
        updater.accumulate_(torch.zeros(4), torch.zeros(4, dtype=torch.int32))
    with pytest.raises(SlideError, match="src has 3 elements"):
        updater.accumulate_(torch.zeros(4), torch.zeros(3))


def test_impossible_threads_are_refused():
    with pytest.raises(SlideError, match="core 100000"):
        CpuUpdater(1, [100000])
    with pytest.raises(SlideError, match="at least 1 thread"):
        CpuUpdater(0)
