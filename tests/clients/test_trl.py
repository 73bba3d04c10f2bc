"""TRL's trainers, unchanged: the JSON's key "ds_slide" is the only difference between two runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from workers import distance

# Two runs of one process each, with the imports before the first.
pytestmark = pytest.mark.timeout(600)

# Weights of bf16 differ by single roundings after the first update (see tests/end_to_end/steps/test_parity.py).
LOSS_TOLERANCE = 2.0**-9
CASES = [
    "sft",
    "sft-tied",
    "sft-without-checkpointing",
    "sft-re-entrant",
    "sft-assistant-only",
    "sft-packing",
    "sft-ranks",
    "sft-autocast",
    "sft-lora",
    "dpo",
    "dpo-lora",
    "grpo",
    "grpo-streamed",
    "grpo-beta",
    "grpo-beta-streamed",
    "reward",
]
# What is counted or drawn, and so is the same to the digit. Of GRPO: lengths and rewards of what the model generated.
SAME = ("learning_rate", "num_tokens", "completions/", "reward", "frac_reward")


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_stocks(case: str, trl_worker: Any) -> None:
    ranks = 2 if case == "sft-ranks" else 1
    stock, slide = trl_worker.run(case, "stock", ranks), trl_worker.run(case, "slide", ranks)
    assert stock["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
    assert slide["optimizer"] == "SlideZeroOptimizer"
    assert slide["ranks"] == stock["ranks"] == ranks
    assert len(slide["log"]) == len(stock["log"]) == 4
    for ours, theirs in zip(slide["log"], stock["log"], strict=True):
        assert ours.keys() == theirs.keys()
        # RewardTrainer's loss is in bf16, two of whose steps this is.
        tolerance = 2.0**-8 if case == "reward" else LOSS_TOLERANCE
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=tolerance)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.01)
        if case.startswith("grpo"):
            counted = [name for name in theirs if name.startswith(SAME)]
            assert "reward" in counted
            assert {name: ours[name] for name in counted} == {name: theirs[name] for name in counted}
    _compare_weights(slide["weights"], stock["weights"], slide["before"])


def _compare_weights(ours: dict[str, Any], theirs: dict[str, Any], before: dict[str, Any]) -> None:
    """Equal but for a small part of what training has moved them by. Where a gradient is next to nothing Adam makes a
    whole step of the sign of its rounding, so single elements may differ by more."""
    assert ours.keys() == theirs.keys() == before.keys()
    moved = {name for name, weight in theirs.items() if not torch.equal(weight, before[name])}
    assert moved == {name for name, weight in ours.items() if not torch.equal(weight, before[name])}
    assert moved
    for name in moved:
        # 2^-7: two elements of a norm's weight, near 1, that were rounded to neighbours.
        assert distance([ours[name]], [theirs[name]]) < 0.1 * distance([theirs[name]], [before[name]]) + 2.0**-7, name
    mine, stocks, start = ([weights[name] for name in sorted(moved)] for weights in (ours, theirs, before))
    assert distance(mine, stocks) < 0.02 * distance(stocks, start)
