"""Gradients of outer modules that the ranks average from where autograd left them: the bits of packed ones."""

from __future__ import annotations

from typing import Any

import pytest
import two_ranks
from averaged_worker import RUNS
from harness import unequal

Seen = list[dict[str, Any]]
LARGE = {"outer:inp", "outer:extra"}
OTHERS = {"outer", *(f"blocks.{number}" for number in range(4))}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each rank has seen. Neither gloo nor NCCL divides by three as it reads, and gloo never does."""
    world: int = request.param
    folder = two_ranks.run("averaged_worker.py", tmp_path_factory.mktemp("ranks"), str(world))
    return two_ranks.seen_by(folder, world)


@pytest.mark.parametrize("name", RUNS)
def test_same_bits_as_packed(name: str, ranks: Seen) -> None:
    for of_rank in ranks:
        found, packed = of_rank[name]
        assert found["losses"] == packed["losses"]
        assert found["norms"] == packed["norms"]
        assert unequal(found["states"], packed["states"]) == []
        assert found["norms"] == ranks[0][name][0]["norms"]
        assert unequal(found["states"], ranks[0][name][0]["states"]) == []


@pytest.mark.parametrize("name", RUNS)
def test_the_way_of_each_gradient(name: str, ranks: Seen) -> None:
    """Of one matrix alone, without padding. A second parameter that is trained later has it packed from then on."""
    for of_rank in ranks:
        found, packed = of_rank[name]
        assert found["ways"]["in place"] == LARGE
        assert found["ways"]["packed"] == OTHERS | ({"outer:inp"} if name == "unfrozen" else set())
        assert packed["ways"] == {"in place": set(), "packed": LARGE | OTHERS}
        first, last = found["staged"][0], found["staged"][-1]
        assert first < packed["staged"][0]
        assert (last > first) == (name == "unfrozen")


@pytest.mark.parametrize("name", RUNS)
def test_a_gradient_that_a_hook_holds_is_not_written(name: str, ranks: Seen) -> None:
    for of_rank in ranks:
        found, _ = of_rank[name]
        assert found["held"] and found["written"] == []
