"""Gradients of outer modules that the ranks average from where autograd left them: the bits of packed ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import two_ranks
from averaged_worker import RUNS
from harness import unequal

Seen = list[dict[str, Any]]
Runs = Callable[[int], Seen]
LARGE = {"outer:inp", "outer:extra"}
OTHERS = {"outer", *(f"blocks.{number}" for number in range(4))}


each_run = pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, marks=pytest.mark.slow if (number + world) % 2 else ())
        for world in (2, 3)
        for number, name in enumerate(RUNS)
    ],
)
"""Each on two ranks and on three, one of which is quick. Neither gloo nor NCCL divides by three as it reads, and gloo
never does."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What each of so many ranks has seen, which run all cases of this session once."""

    @functools.cache
    def run(world: int) -> Seen:
        names = dict.fromkeys(row["name"] for row in two_ranks.asked_for(request) if row["world"] == world)
        folder = two_ranks.run("averaged_worker.py", tmp_path_factory.mktemp("ranks"), str(world), *names)
        return two_ranks.seen_by(folder, world)

    return run


@each_run
def test_same_bits_as_packed(world: int, name: str, runs: Runs) -> None:
    for of_rank in runs(world):
        found, packed = of_rank[name]
        assert found["losses"] == packed["losses"]
        assert found["norms"] == packed["norms"]
        assert unequal(found["states"], packed["states"]) == []
        assert found["norms"] == runs(world)[0][name][0]["norms"]
        assert unequal(found["states"], runs(world)[0][name][0]["states"]) == []


@each_run
def test_the_way_of_each_gradient(world: int, name: str, runs: Runs) -> None:
    """Of one matrix alone, without padding. A second parameter that is trained later has it packed from then on."""
    for of_rank in runs(world):
        found, packed = of_rank[name]
        assert found["ways"]["in place"] == LARGE
        assert found["ways"]["packed"] == OTHERS | ({"outer:inp"} if name == "unfrozen" else set())
        assert packed["ways"] == {"in place": set(), "packed": LARGE | OTHERS}
        first, last = found["staged"][0], found["staged"][-1]
        assert first < packed["staged"][0]
        assert (last > first) == (name == "unfrozen")


@each_run
def test_a_gradient_that_a_hook_holds_is_not_written(world: int, name: str, runs: Runs) -> None:
    for of_rank in runs(world):
        found, _ = of_rank[name]
        assert found["held"] and found["written"] == []
