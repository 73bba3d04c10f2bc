"""Ranks whose batches use different modules: DDP's numbers, on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from differing import ALL, CASES, GRID, LONG, VISION_LANGUAGE, reference
from loops import TOLERANCE, distance

THREE_RANKS = [
    "mixture, clip 1.0, accumulation 2",
    "mixture, clip 0.0, accumulation 1",
    "llava",
    "only vision trained",
    "expected in vain",
]

# Each beside another schedule of the same model.
SLOW = (
    *("expected in vain, clip 0.0", "expected in vain, accumulation", "only vision trained, accumulation"),
    *("experts inside, gathered, clip 0.0", "experts inside, gathered, accumulation"),
)

Seen = list[dict[str, Any]]
Runs = Callable[..., Seen]


def run_worker(worker: str, folder: Path, ranks: int, *arguments: str) -> Seen:
    """What each rank has left."""
    return two_ranks.seen_by(two_ranks.run(worker, folder, str(ranks), *arguments), ranks)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs the cases of a test on so many ranks, all in one process each, once."""

    @functools.cache
    def run(ranks: int, *tests: str) -> Seen:
        names = [row["name"] for test in tests for row in two_ranks.asked_for(request, test)]
        return run_worker("differing_worker.py", tmp_path_factory.mktemp("ranks"), ranks, *dict.fromkeys(names))

    return run


def assert_as_one_process(name: str, seen: Seen) -> None:
    """All ranks have the same masters, and those of plain torch."""
    expected = reference(ALL[name], len(seen))
    norm, masters = seen[0][name]
    for of_rank in seen[1:]:
        assert of_rank[name][0] == norm
        for parameter, master in masters[0].items():
            assert torch.equal(of_rank[name][1][0][parameter], master), parameter
    assert distance(replace(expected, masters=masters), expected) < TOLERANCE
    assert norm == pytest.approx(expected.returned, rel=1e-4)


TWO_RANKS = ("test_two_ranks", "test_two_ranks_whose_steps_differ", "test_models_of_vision_and_language")


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", GRID)
def test_two_ranks_whose_steps_differ(name: str, runs: Runs) -> None:
    assert_as_one_process(name, runs(2, *TWO_RANKS))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_two_ranks(name: str, runs: Runs) -> None:
    assert_as_one_process(name, runs(2, *TWO_RANKS))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_models_of_vision_and_language(name: str, runs: Runs) -> None:
    assert_as_one_process(name, runs(2, *TWO_RANKS))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", THREE_RANKS)
def test_three_ranks(name: str, runs: Runs) -> None:
    assert_as_one_process(name, runs(3, "test_three_ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", LONG)
def test_many_steps_of_random_mixtures(name: str, ranks: int, runs: Runs) -> None:
    assert_as_one_process(name, runs(ranks, "test_many_steps_of_random_mixtures"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What two ranks saw of which one does something that the other does not."""
    return run_worker("alone_worker.py", tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize("what", ["evaluation", "gradients of inputs", "nothing"])
def test_what_one_rank_does_alone_waits_for_nobody(what: str, alone: Seen) -> None:
    for seen in alone:
        for name, master in alone[0]["nothing"].items():
            assert torch.equal(seen[what][name], master), name


def test_one_rank_has_one_more_loss(alone: Seen) -> None:
    """Its second backward counts as a part of the same step, of which the other rank has nothing."""
    for seen in alone:
        for name, master in alone[0]["both losses in one"].items():
            torch.testing.assert_close(seen["one more loss"][name], master, rtol=1e-4, atol=1e-6)


def test_a_gathered_block_that_one_rank_enters_ends_in_a_sentence_on_all(alone: Seen) -> None:
    sentences = [seen["gathered"] for seen in alone]
    assert sentences[0] == sentences[1]
    assert "the ranks have come to different places of the program: rank 0 to gathering the weights of" in sentences[0]
    assert "vision.0" in sentences[0] and "layers.0" in sentences[0]
    assert all(seen["seconds until the sentence"] < 10 for seen in alone)


def test_ranks_on_several_machines_keep_the_order_of_the_program(tmp_path: Path) -> None:
    for seen in run_worker("apart_worker.py", tmp_path, 2):
        assert not seen["has a board"]
        assert seen["same modules"] < TOLERANCE
        assert "the ranks have called different collectives in this step" in seen["another order"]
