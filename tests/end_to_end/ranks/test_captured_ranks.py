"""Two ranks over gloo whose blocks replay recordings have the bits of ranks whose blocks run as they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import two_ranks
from captured_ranks_worker import SCHEDULES
from harness import LAYERS, unequal

# The others clip, and do not.
SLOW = ("clipping", "immediate")
schedules = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SCHEDULES]
)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = dict.fromkeys(two_ranks.names_asked_for(request, {}))
    return two_ranks.run("captured_ranks_worker.py", tmp_path_factory.mktemp("ranks"), *names)


@schedules
def test_replayed_blocks_have_the_same_bits(name: str, seen: list[dict[str, Any]]) -> None:
    for results in seen:
        losses, states, replayed, replays = results[f"{name} True"]
        expected_losses, expected, none, _ = results[f"{name} False"]
        assert (replayed, none) == (LAYERS, 0)
        # In each micro-batch: forward and backward, and of a recomputed block the forward once more.
        assert replays == LAYERS * (3 if name == "streamed" else 2)
        assert losses == expected_losses
        assert unequal(states, expected) == []


@schedules
def test_both_ranks_have_the_same_weights(name: str, seen: list[dict[str, Any]]) -> None:
    assert unequal(seen[0][f"{name} True"][1], seen[1][f"{name} True"][1]) == []
