"""Blocks that stream, or whose activations find no memory, replay their forward, recomputation and backward. They have
the bits of blocks that are recomputed by operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activation_runs import MODELS, SCHEDULES, layers_of, run
from captured_loops import LOOPS
from captured_runs import STEPS, STREAMED, Train, both, counted_replays
from harness import batches, differences

from ds_slide.runtime.captured.graphs import Graph

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_rank")]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """All replays, of forwards and backwards."""
    return counted_replays(monkeypatch)


def plain(name: str) -> Any:
    """A model of `MODELS` that draws no random numbers."""
    model = MODELS[name]()
    for each in model.modules():
        for what in ("attention_dropout",):
            if hasattr(each, what):
                setattr(each, what, 0.0)
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0
    return model


@pytest.mark.parametrize("window", [2, 3, "auto"])
@pytest.mark.parametrize(("name", "schedule"), [("llama", each) for each in SCHEDULES] + [("adapters", "clipping")])
def test_streamed_blocks_have_the_same_bits(name: str, schedule: str, window: Any, replays: list[Graph]) -> None:
    count = SCHEDULES[schedule][1]
    data = batches((STEPS + 2) * count)
    slide = {**STREAMED, "window": window}
    expected, report = run(plain(name), {**slide, "captured_blocks": False}, data, schedule)
    assert not replays
    result, report = run(plain(name), {**slide, "captured_blocks": True}, data, schedule)
    assert differences(result, expected) == []
    assert report["replayed"] == report["recompute"] == len(layers_of(plain(name)))
    assert len(replays) > 3 * report["replayed"]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_as_people_write_them(loop: Train, replays: list[Graph]) -> None:
    expected, result = both(loop, slide=STREAMED)
    assert differences(result, expected) == []
    assert replays
