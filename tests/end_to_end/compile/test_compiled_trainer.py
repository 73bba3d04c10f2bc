"""`TrainingArguments(torch_compile=True)`, with non-re-entrant checkpointing, in bf16, with inductor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import warm
from hf_trainer_worker import COMPILED, STEPS

pytestmark = pytest.mark.slow  # inductor compiles a Llama


def test_losses_are_stocks(tmp_path: Path) -> None:
    run = warm.start("hf_trainer_worker.py", tmp_path, *COMPILED, folder=tmp_path)
    assert run.end() == 0, run.log[-6000:]
    theirs, ours = (torch.load(tmp_path / f"{name}.pt") for name in COMPILED)
    assert ours["optimizer"] == "SlideZeroOptimizer"
    assert len(ours["log"]) == STEPS
    for our, their in zip(ours["log"], theirs["log"], strict=True):
        # Inductor keeps in fp32 what eager code rounds to bf16 between two operators.
        assert our["loss"] == pytest.approx(their["loss"], abs=0.02)
        assert our["grad_norm"] == pytest.approx(their["grad_norm"], rel=0.05)
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=0.02)
