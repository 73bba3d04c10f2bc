"""Two ranks over gloo, each with a flat piece of every parameter, train with an optimizer of the script."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from client_ranks_worker import RUNS, plain

WORKER = "client_ranks_worker.py"


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("stock")])
def test_two_ranks_train_as_plain_torch_does(name: str, seen: list[dict[str, Any]]) -> None:
    optimizer, _, clip = RUNS[name]
    expected = plain(optimizer, clip)
    for results in seen:
        for parameter, master in results[name].items():
            torch.testing.assert_close(master, expected[parameter], rtol=1e-3, atol=1e-4, msg=parameter)


def test_two_ranks_train_as_stock_does(seen: list[dict[str, Any]]) -> None:
    for results in seen:
        for parameter, master in results["NAdam"].items():
            torch.testing.assert_close(master, results["stock NAdam"][parameter], rtol=1e-5, atol=1e-6, msg=parameter)


def test_a_resumed_run_of_two_ranks_continues_to_the_bit(seen: list[dict[str, Any]]) -> None:
    for results in seen:
        expected, found = results["resumed"]
        assert all(torch.equal(found[name], master) for name, master in expected.items())


def test_optimizers_that_treat_shapes_ask_for_flat_pieces(seen: list[dict[str, Any]]) -> None:
    expected = plain("Adafactor", 1.0)
    for results in seen:
        assert "treats matrices by their shape, but each of 2 ranks has a flat piece" in results["refusal"]
        assert "flat_pieces" in results["refusal"]
        apart = max(float((master - expected[name]).abs().max()) for name, master in results["flat"].items())
        assert 1e-3 < apart < 1.0  # it trains, and is another optimizer
