"""Compiled blocks on two ranks over gloo."""

from __future__ import annotations

from typing import Any

import pytest
from compiled_ranks_worker import RUNS

WORKER = "compiled_ranks_worker.py"

pytestmark = pytest.mark.slow  # one rank is in test_compiled_training


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_stocks_and_blocks_are_compiled_once(name: str, seen: list[dict[str, Any]]) -> None:
    for results in seen:
        losses, blocks = results[name]
        assert losses == pytest.approx(results["stock"][0], abs=1e-6)
        assert blocks == 1
