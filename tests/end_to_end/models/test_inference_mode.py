"""Evaluations under `torch.inference_mode()` between training steps leave nothing of theirs in the parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from harness import batches, ds_config, engine_for, llama, on_ssd

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_rank")

PLACES: list[dict[str, Any]] = [
    {"window": 2, "gpu_states": 0},
    {"gpu_states": "1GiB"},
    {"window": 2, "gpu_states": 0, "gpu_memory": "1MB"},
    {"stream_head": True},
    {"window": 2, "gpu_states": 0, "host_memory": 0},
    {"gpu_states": 0, "compression": {"type": "lsp", "d": 32, "r": 2}},
]


def losses(slide: dict[str, Any], clip: float, folder: Path, mode: Callable[[], Any]) -> list[float]:
    """Of training and evaluation in turns, the latter before the first step, too, and with weights gathered."""
    model, found = llama(), list[float]()
    config = ds_config(slide, clip=clip)
    if "host_memory" in slide:
        on_ssd(config, folder)
    with engine_for(model, config) as engine:
        for batch in batches(3):
            with mode(), deepspeed.zero.GatheredParameters([model.lm_head.weight, model.model.norm.weight]):
                found.append(model.lm_head.weight.sum().item())
            with mode():
                found.append(engine(**batch).loss.item())
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
            with mode():
                found.append(engine(**batch).loss.item())
    return found


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("slide", PLACES, ids=str)
def test_training_goes_on_as_after_no_grad(slide: dict[str, Any], clip: float, tmp_path: Path) -> None:
    expected = losses(slide, clip, tmp_path, torch.no_grad)
    assert losses(slide, clip, tmp_path, torch.inference_mode) == expected
