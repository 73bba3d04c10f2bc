"""Two ranks over gloo whose blocks replay recordings have the bits of ranks whose blocks run as they are written."""

from __future__ import annotations

from typing import Any

import pytest
from captured_ranks_worker import SCHEDULES
from harness import LAYERS, unequal

WORKER = "captured_ranks_worker.py"


@pytest.mark.parametrize("name", SCHEDULES)
def test_replayed_blocks_have_the_same_bits(name: str, seen: list[dict[str, Any]]) -> None:
    for results in seen:
        losses, states, replayed, replays = results[f"{name} True"]
        expected_losses, expected, none, _ = results[f"{name} False"]
        assert (replayed, none) == (LAYERS, 0)
        # In each micro-batch: forward and backward, and of a recomputed block the forward once more.
        assert replays == LAYERS * (3 if name == "streamed" else 2)
        assert losses == expected_losses
        assert unequal(states, expected) == []


def test_both_ranks_have_the_same_weights(seen: list[dict[str, Any]]) -> None:
    for name in SCHEDULES:
        assert unequal(seen[0][f"{name} True"][1], seen[1][f"{name} True"][1]) == []
