"""Four and eight ranks over gloo: stock's losses, and the same weights on all ranks wherever states are."""

from __future__ import annotations

from typing import Any

import pytest
import two_ranks
from harness import Result, differences, unequal
from many_ranks_worker import RUNS

pytestmark = pytest.mark.slow

# As in test_ranks.py: averages and norms of bf16 gradients are rounded at other places.
LOSS_TOLERANCE = 2.0**-8
STOCK = {"clipping": "stock", "accumulation": "stock-accumulation"}
SAME_BITS = {
    "delays": "clipping",
    "gathered": "clipping",
    "gpu-states": "clipping",
    "ssd": "clipping",
    "immediate-gathered": "immediate",
    "skipping-delays": "skipping",
}
OURS = [name for name in RUNS if name not in STOCK.values()]


@pytest.fixture(scope="module", params=[4, 8])
def of_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    """Results by run and rank."""
    world: int = request.param
    folder = tmp_path_factory.mktemp(f"ranks{world}")
    two_ranks.run("many_ranks_worker.py", folder, str(world), *RUNS, timeout_s=900)
    seen: list[dict[str, Any]] = two_ranks.seen_by(folder, world)
    return {name: [Result(**results[name]) for results in seen] for name in RUNS}


@pytest.mark.parametrize("name", OURS)
def test_all_ranks_have_the_same_weights(of_ranks: dict[str, list[Result]], name: str) -> None:
    first, *others = of_ranks[name]
    for other in others:
        assert other.losses != first.losses  # each its own part of the data
        assert other.norms == first.norms
        assert unequal(other.states, first.states) == []


@pytest.mark.parametrize(("name", "stock"), list(STOCK.items()))
def test_losses_are_stocks(of_ranks: dict[str, list[Result]], name: str, stock: str) -> None:
    for ours, theirs in zip(of_ranks[name], of_ranks[stock], strict=True):
        assert ours.losses[0] == theirs.losses[0]
        assert ours.losses == pytest.approx(theirs.losses, abs=LOSS_TOLERANCE)


@pytest.mark.parametrize(("name", "expected"), list(SAME_BITS.items()))
def test_placement_and_timing_change_no_bit(of_ranks: dict[str, list[Result]], name: str, expected: str) -> None:
    for found, other in zip(of_ranks[name], of_ranks[expected], strict=True):
        assert differences(found, other) == []


def test_ranks_that_skip_other_blocks_train_otherwise(of_ranks: dict[str, list[Result]]) -> None:
    assert unequal(of_ranks["skipping"][0].states, of_ranks["immediate"][0].states)
