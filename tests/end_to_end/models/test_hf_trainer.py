"""Hugging Face's Trainer with "auto" values, checkpoints, evaluation and save_model: the key is all that changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import warm
from hf_trainer_worker import EVALUATIONS, REFUSED, RUNS, SAVED_AT, STEPS, model

# Weights of bf16 differ by single roundings after the first update (see test_parity.py).
TOLERANCE = 2.0**-9


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trainer")
    run = warm.start("hf_trainer_worker.py", folder, folder=folder)
    assert run.end() == 0, run.log[-6000:]
    # Of the runs with the key; it is Trainer that says how often steps are printed: never.
    own = [line for line in run.log.splitlines() if "[ds_slide]" in line]
    assert [line.partition("] DS-Slide ")[1] for line in own] == ["] DS-Slide "] * 3, own
    refused = {name: (folder / f"{name}.err").read_text() for name in REFUSED}
    return {name: torch.load(folder / f"{name}.pt") for name in (*RUNS, *EVALUATIONS)} | refused


def test_the_key_chooses_the_engine(trained: dict[str, Any]) -> None:
    found = {run: trained[run]["optimizer"] for run in RUNS}
    slide = "SlideZeroOptimizer"
    assert found == {"stock": "DeepSpeedZeroOptimizer_Stage3", "slide": slide, "resumed": slide}


def test_losses_norms_and_rates_follow_stock(trained: dict[str, Any]) -> None:
    ours, theirs = trained["slide"]["log"], trained["stock"]["log"]
    assert [entry["step"] for entry in ours] == list(range(1, STEPS + 1))
    for our, their in zip(ours, theirs, strict=True):
        assert our["loss"] == pytest.approx(their["loss"], abs=TOLERANCE)
        assert our["grad_norm"] == pytest.approx(their["grad_norm"], rel=0.01)
        assert our["learning_rate"] == their["learning_rate"]
    assert trained["slide"]["eval_loss"] == pytest.approx(trained["stock"]["eval_loss"], abs=TOLERANCE)


def test_a_callback_logs_the_statistics(trained: dict[str, Any]) -> None:
    first, *logs = trained["slide"]["log"]
    assert "bound_lane" not in first, "no step has been measured yet"
    assert {entry["bound_lane"] for entry in logs} <= {"compute", "h2d", "d2h", "update"}
    assert all(0.0 < entry["efficiency"] <= 1.0 for entry in logs)


def test_a_resumed_run_goes_on_to_the_bit(trained: dict[str, Any]) -> None:
    whole, resumed = trained["slide"], trained["resumed"]
    for entry, again in zip(whole["log"][SAVED_AT:], resumed["log"][-(STEPS - SAVED_AT) :], strict=True):
        assert (again["step"], again["loss"], again["grad_norm"]) == (entry["step"], entry["loss"], entry["grad_norm"])
    assert resumed["eval_loss"] == whole["eval_loss"]
    assert all(torch.equal(resumed["weights"][name], weight) for name, weight in whole["weights"].items())


def test_the_saved_model_is_the_trained_one(trained: dict[str, Any]) -> None:
    weights = trained["slide"]["weights"]
    fresh = model().bfloat16()
    assert weights.keys() == dict(fresh.named_parameters()).keys()
    changed = [name for name, parameter in fresh.named_parameters() if not torch.equal(weights[name], parameter)]
    # A norm's weights near 1 have steps of 2^-7 in bf16: eight updates of 1e-3 at most move none of them.
    assert {name for name in weights if "norm" not in name} <= set(changed)
    fresh.load_state_dict(weights)
    tokens = torch.randint(256, (40, 32), generator=torch.Generator().manual_seed(3))[:4]
    loss = fresh(input_ids=tokens, labels=tokens).loss.item()
    assert loss == pytest.approx(trained["slide"]["eval_loss"], abs=TOLERANCE)


def test_an_evaluation_without_a_training_is_stocks_to_the_bit(trained: dict[str, Any]) -> None:
    ours, theirs = trained["slide-evaluation"], trained["stock-evaluation"]
    assert (ours["optimizer"], theirs["optimizer"]) == ("SlideZeroOffload", "DeepSpeedZeRoOffload")
    assert ours["eval_loss"] == theirs["eval_loss"]
    assert torch.equal(ours["logits"], theirs["logits"])
    assert ours["weights"].keys() == theirs["weights"].keys()
    assert all(torch.equal(ours["weights"][name], weight) for name, weight in theirs["weights"].items())


@pytest.mark.parametrize(
    ("run", "sentence", "arguments_are_made"),
    [
        ("json", "zero_optimization.zero_hpz_partition_size is 2, but DS-Slide does not support ZeRO++; use 1", False),
        ("adafactor", "parameter group 0 of DeepSpeedCPUAdam has eps (1e-30, 0.001) and betas", True),
    ],
)
def test_a_refusal_is_the_last_line_on_the_screen(
    trained: dict[str, Any], run: str, sentence: str, arguments_are_made: bool
) -> None:
    last = trained[run].splitlines()[-1].removeprefix("[rank0]: ")
    assert last.startswith(f"ds_slide.errors.SlideConfigError: {sentence}"), trained[run]
    assert (f"{run}: the arguments are made" in trained[run]) == arguments_are_made
