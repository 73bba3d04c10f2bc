"""TRL's trainers, unchanged: the JSON's key "ds_slide" is the only difference between two runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

# Two runs of one process each, with the imports before the first.
pytestmark = pytest.mark.timeout(600)

# Weights of bf16 differ by single roundings after the first update (see tests/integration/test_parity.py).
LOSS_TOLERANCE = 2.0**-9
CASES = [
    "sft",
    "sft-tied",
    "sft-without-checkpointing",
    "sft-re-entrant",
    "sft-assistant-only",
    "sft-packing",
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
SAME = ("step", "learning_rate", "num_tokens", "completions/", "reward", "frac_reward")


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_stocks(case: str, trl_worker: Any) -> None:
    stock, slide = trl_worker.run(case, "stock"), trl_worker.run(case, "slide")
    assert stock["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
    assert slide["optimizer"] == "SlideZeroOptimizer"
    assert len(slide["log"]) == len(stock["log"]) == 4
    for ours, theirs in zip(slide["log"], stock["log"], strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=LOSS_TOLERANCE)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.01)
        if case.startswith("grpo"):
            counted = [name for name in theirs if name.startswith(SAME)]
            assert "reward" in counted
            assert {name: ours[name] for name in counted} == {name: theirs[name] for name in counted}
    _compare_weights(slide["weights"], stock["weights"], slide["before"])


def _compare_weights(ours: dict[str, Any], theirs: dict[str, Any], before: dict[str, Any]) -> None:
    """Four updates of 1e-3 at most each: equal but for roundings, and different from what they were."""
    assert ours.keys() == theirs.keys() == before.keys()
    moved = 0
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=2e-3, rtol=2.0**-7)
        moved += not torch.equal(weight, before[name])
    assert moved >= sum(not torch.equal(theirs[name], before[name]) for name in before) > 0
