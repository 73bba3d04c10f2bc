"""Two ranks over gloo, each with half of the batch and half of every parameter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from harness import Result, batches, differences, ds_config, llama, trained, unequal
from ranks_worker import BLOCKS, STEPS

WORKER = "ranks_worker.py"
# The average of two gradients in bf16 is not the gradient of the mean in bf16: 2^-9 each, and so for the norm.
LOSS_TOLERANCE = 2.0**-8
# Run, and the run in host memory whose bits it has.
SAME_BITS = {
    "sums": "accumulation",
    "sums-gathered": "accumulation",
    "delays": "clipping",
    "speculative": "held",
    "speculative-gathered": "held",
    "speculative-by-one": "held",
    "gpu-states": "clipping",
    "immediate-gpu-states": "immediate",
    "ssd": "clipping",
    "ssd-immediate": "immediate",
    "ssd-gradients": "clipping",
    "gathered": "clipping",
    "gathered-immediate": "immediate",
    "gathered-kept": "accumulation",
    "gathered-gpu-states": "immediate",
    "ssd-states": "clipping",
    "ssd-less-memory": "clipping",
    "moves": "clipping",
    "moves-immediate": "immediate",
    "moves-gathered": "accumulation",
    "moves-gathered-kept": "immediate",
    "moves-ssd": "clipping",
    "moves-ssd-immediate": "immediate",
    "spare": "clipping",
    "spare-gathered": "immediate",
    "ssd-inputs": "clipping",
}
ALWAYS = ("clipping", "immediate", "immediate-gpu-states", "gpu-states", "accumulation", "held", "stock")
# Each beside another run of the same kind: with clipping or without, shared or gathered.
SLOW = (
    *("speculative-gathered", "gathered", "gathered-immediate", "gathered-gpu-states", "ssd", "ssd-immediate", "spare"),
    *("moves-immediate", "moves-gathered-kept", "moves-ssd", "tiled", "gathered-kept", "ssd-states"),
)


def runs(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


RankResults = Callable[[str], list[Result]]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = dict.fromkeys([*ALWAYS, *two_ranks.names_asked_for(request, SAME_BITS)])
    return two_ranks.run(WORKER, tmp_path_factory.mktemp("ranks"), *names)


@pytest.fixture(scope="module")
def of_ranks(seen: list[dict[str, Any]]) -> RankResults:
    """Results of a run of `ranks_worker.RUNS` by rank."""
    return lambda name: [Result(**results[name]) for results in seen]


def test_no_lane_calls_a_collective(seen: list[dict[str, Any]]) -> None:
    for results in seen:
        callers = results["callers"]
        assert {"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"} <= callers.keys()
        # Autograd's thread was not made by Python, so Python calls it a dummy.
        strange = [name for names in callers.values() for name in names if not name.startswith(("MainThread", "Dummy"))]
        assert strange == []


def test_ranks_of_the_same_modules_wait_for_each_other_once_a_step_without_clipping(seen: list[dict[str, Any]]) -> None:
    """Their backwards end settled, behind which a step has no meetings (`ds_slide.runtime.core.ranks.conductor`)."""
    for results in seen:
        for name in ("immediate", "immediate-gpu-states"):
            assert results["settled"][name] == [True] * STEPS
        assert results["settled"]["clipping"] == [False] * STEPS


@pytest.mark.parametrize("name", ["immediate", "immediate-gpu-states"])
def test_a_step_without_clipping_has_no_meeting(seen: list[dict[str, Any]], name: str) -> None:
    """Nor has the forward behind it, where the weights that the step has changed on the GPU are gathered already."""
    entries = seen[0]["entered"][name]
    ends = [index for index, entry in enumerate(entries) if entry == "END"]
    assert "MEETING" not in entries[ends[0] : ends[-1]]


@pytest.mark.parametrize("name", ["clipping", "gpu-states"])
def test_a_step_with_clipping_has_two_meetings(seen: list[dict[str, Any]], name: str) -> None:
    """One before it and one for its norm, however many units are updated on the GPU and gathered."""
    entries = seen[0]["entered"][name]
    ends = [index for index, entry in enumerate(entries) if entry == "END"]
    assert {entries[end:after].count("MEETING") for end, after in pairwise(ends)} == {2}


@pytest.mark.parametrize("name", ["immediate", "immediate-gpu-states", "clipping", "gpu-states", "accumulation"])
def test_ranks_of_the_same_modules_agree_on_an_order_once_a_backward(seen: list[dict[str, Any]], name: str) -> None:
    """From the second backward on: none of its averages waits until rank 0 has seen the others."""
    entries = [entry for entry in seen[0]["entered"][name] if entry != "MEETING"]
    after_first = entries[entries.index("END") + 1 :]
    backwards = STEPS * (2 if name == "accumulation" else 1)
    assert after_first == ["ORDER", "END"] * (backwards - 1)


@pytest.mark.parametrize("name", runs("clipping", "immediate", "accumulation", "held", *SAME_BITS))
def test_all_ranks_have_the_same_weights(of_ranks: RankResults, name: str) -> None:
    first, second = of_ranks(name)
    assert first.losses != second.losses  # each its own half of the data
    assert first.norms == second.norms
    assert unequal(first.states, second.states) == []


@pytest.mark.parametrize("name", runs(*SAME_BITS))
def test_placement_and_timing_change_no_bit(of_ranks: RankResults, name: str) -> None:
    for found, expected in zip(of_ranks(name), of_ranks(SAME_BITS[name]), strict=True):
        assert differences(found, expected) == []


def test_against_stock(of_ranks: RankResults) -> None:
    for slide, stock in zip(of_ranks("clipping"), of_ranks("stock"), strict=True):
        assert slide.losses[:2] == stock.losses[:2]
        assert slide.losses == pytest.approx(stock.losses, abs=LOSS_TOLERANCE)


@pytest.mark.parametrize("name", runs("tiled"))
def test_tiles_of_mlps_have_the_numbers_of_the_whole(of_ranks: RankResults, name: str) -> None:
    """DeepSpeed's TiledMLP, with a backward for each tile inside of a block's backward."""
    for found, expected in zip(of_ranks(name), of_ranks("clipping"), strict=True):
        assert found.losses == pytest.approx(expected.losses, abs=LOSS_TOLERANCE)
        assert found.norms == pytest.approx(expected.norms, rel=LOSS_TOLERANCE)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("name", "clip", "accumulation"), [("clipping", 1.0, 1), ("immediate", 0.0, 1), ("accumulation", 1.0, 2)]
)
def test_against_one_rank_with_the_whole_batch(
    of_ranks: RankResults, name: str, clip: float, accumulation: int
) -> None:
    halves = batches(2 * STEPS * accumulation)
    whole = [
        {key: torch.cat([left[key], right[key]]) for key in left}
        for left, right in zip(halves[::2], halves[1::2], strict=True)
    ]
    config = ds_config({"window": 2}, clip=clip, accumulation=accumulation, train_micro_batch_size_per_gpu=4)
    alone = trained(llama(num_hidden_layers=BLOCKS), config, whole)
    first, second = of_ranks(name)
    together = [(left + right) / 2 for left, right in zip(first.losses, second.losses, strict=True)]
    assert together == pytest.approx(alone.losses, abs=LOSS_TOLERANCE)
    assert together[0] == pytest.approx(alone.losses[0], abs=1e-6)
    assert first.norms[0] == pytest.approx(alone.norms[0], rel=LOSS_TOLERANCE)
