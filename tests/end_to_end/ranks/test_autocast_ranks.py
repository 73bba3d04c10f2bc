"""`torch_autocast` on two ranks over gloo: weights and gradients in bf16 between the ranks, as in stock."""

from __future__ import annotations

from typing import Any

import pytest
from autocast_worker import STEPS
from harness import Result, differences

WORKER = "autocast_worker.py"
# As in test_autocast; and the gradients' averages are rounded once more.
TOLERANCE = 2.0**-9


pytestmark = pytest.mark.slow  # half a minute; one rank is in test_autocast


@pytest.mark.parametrize(("name", "stock"), [("shared", "stock"), ("gathered", "stock"), ("tied", "stock tied")])
def test_losses_are_stocks(name: str, stock: str, seen: list[dict[str, Any]]) -> None:
    """A tied embedding computes here with its exact values and in stock with what has been gathered in bf16."""
    for results in seen:
        assert len(results[name]["losses"]) == STEPS
        assert results[name]["losses"] == pytest.approx(results[stock]["losses"], abs=TOLERANCE)
        assert results[name]["norms"] == pytest.approx(results[stock]["norms"], rel=1e-2)


def test_the_ways_of_weights_change_no_bit(seen: list[dict[str, Any]]) -> None:
    for results in seen:
        one, other = (
            Result(losses=results[name]["losses"], states=results[name]["states"]) for name in ("shared", "gathered")
        )
        assert differences(one, other) == []


def test_ranks_have_the_same_states(seen: list[dict[str, Any]]) -> None:
    for name in ("shared", "gathered", "immediate", "tied"):
        states = [Result(states=results[name]["states"]) for results in seen]
        assert differences(*states) == []
