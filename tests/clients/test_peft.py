"""PEFT's adapters with Hugging Face's Trainer, in the documented order, beside stock ZeRO-3 (`peft_worker.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

Seen = Callable[[str, str], dict[str, Any]]
CASES = ("lora", "dora", "ia3", "modules_to_save", "bf16_adapters", "checkpointing", "autocast")
# Two runs of one process each, with the imports before the first.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def seen(peft_worker: Any) -> Seen:
    """`seen(case, which)`: what that run saw, each made once."""
    return functools.cache(peft_worker.run)


def unequal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_norms_are_stocks(case: str, seen: Seen) -> None:
    stock, slide = seen(case, "stock"), seen(case, "slide")
    assert slide["engine"] == "SlideZeroOptimizer" and stock["engine"] == "DeepSpeedZeroOptimizer_Stage3"
    assert len(slide["losses"]) == 6
    assert slide["losses"][0] == stock["losses"][0]
    # The engines' updates differ by an ulp of fp32, which a bf16 activation may round the other way.
    assert slide["losses"] == pytest.approx(stock["losses"], abs=2.0**-9)
    assert slide["norms"] == pytest.approx(stock["norms"], rel=2e-2)


@pytest.mark.parametrize("case", [case for case in CASES if case != "modules_to_save"])
def test_adapters_end_where_stocks_do(case: str, seen: Seen) -> None:
    stock, slide = seen(case, "stock"), seen(case, "slide")
    apart = come = 0.0
    for name, after in stock["after"].items():
        assert slide["after"][name].dtype == after.dtype
        apart += float((slide["after"][name].float() - after.float()).abs().sum())
        come += float((after.float() - stock["before"][name].float()).abs().sum())
    assert come > 0.0
    assert apart < 0.05 * come


def test_several_data_types_stay_what_they_are(seen: Seen) -> None:
    """Stock brings all that trains to the data type of the first: here the adapters to that of the embedding."""
    for name, after in seen("modules_to_save", "slide")["after"].items():
        assert after.dtype == (torch.bfloat16 if "modules_to_save" in name else torch.float32), name
    assert {after.dtype for after in seen("modules_to_save", "stock")["after"].values()} == {torch.bfloat16}


def test_a_resumed_run_continues_to_the_bit(seen: Seen) -> None:
    whole = seen("lora", "slide")
    resumed = seen("lora", "resumed")  # from the checkpoint that the other has left
    assert resumed["losses"][-3:] == whole["losses"][-3:]
    assert unequal(resumed["after"], whole["after"]) == []


def test_merged_weights_are_those_of_the_saved_adapters(seen: Seen) -> None:
    merged, offline = seen("lora", "slide")["merged"], seen("lora", "offline")["merged"]
    assert unequal(merged, offline) == []
    base = seen("ia3", "stock")["merged"]
    assert not torch.equal(merged["model.layers.0.mlp.down_proj.weight"], base["model.layers.0.mlp.down_proj.weight"])
