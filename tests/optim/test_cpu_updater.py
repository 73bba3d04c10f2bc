"""The tensor-level calls and what they refuse."""

from __future__ import annotations

import pytest
import torch

from ds_slide.errors import SlideError
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater

from .adamw_calls import updater_adamw_

HYPER = AdamWHyper(lr=1e-2, weight_decay=0.1, step=2)


@pytest.fixture(scope="module")
def updater() -> CpuUpdater:
    return CpuUpdater(2)


@pytest.mark.parametrize("weight_format", ["bf16_split", "fp32", "fp16_master"])
def test_same_bits_as_the_reference(updater, make_state_buffers, run_reference, assert_same_bits, weight_format):
    actual = make_state_buffers(weight_format, "bf16", 5000)
    expected = actual.clone()
    updater_adamw_(
        updater, actual.weight, actual.remainder, actual.exp_avg, actual.exp_avg_sq, actual.grad, HYPER, grad_scale=0.5
    )
    run_reference(expected, HYPER, 0.5)
    assert_same_bits(actual, expected)


def test_reference_works_in_chunks(monkeypatch, make_state_buffers, run_reference, assert_same_bits):
    whole = make_state_buffers("bf16_split", "bf16", 5000)
    chunked = whole.clone()
    run_reference(whole, HYPER)
    monkeypatch.setattr("ds_slide.optim.reference._CHUNK", 999)
    run_reference(chunked, HYPER)
    assert_same_bits(chunked, whole)


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
    with pytest.raises(SlideError, match=words):
        updater_adamw_(updater, **(tensors | change), hyper=HYPER)


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
