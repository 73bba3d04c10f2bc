"""Experts that move in parts on two ranks over gloo: each rank fetches what its own tokens need, from both ranks'
memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import two_ranks
from expert_ranks_worker import SHAPES, STEPS
from harness import Result, differences


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = two_ranks.run("expert_ranks_worker.py", tmp_path_factory.mktemp("ranks"))
    return two_ranks.seen_by(folder)


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_change_no_bit(shape: str, seen: list[dict[str, Any]]) -> None:
    """Rank 0 writes to experts of both ranks' parts half-way."""
    for rank in seen:
        parts, whole = rank[f"{shape} parts"], rank[f"{shape} whole"]
        assert parts["in_parts"] and not whole["in_parts"] and len(parts["losses"]) == 2 * STEPS
        found, expected = (Result(losses=each["losses"], states=each["states"]) for each in (parts, whole))
        assert differences(found, expected) == []
    assert seen[0][f"{shape} parts"]["losses"] != seen[1][f"{shape} parts"]["losses"]


def test_gathered_weights_are_refused(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert "each rank has a part of them" in rank["gathered"]
