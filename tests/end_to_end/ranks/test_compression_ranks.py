"""Two ranks that compress their gradients: each has all of the compressed matrices' weights, and makes the same of
them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from compression_ranks_worker import BLOCKS, LSP, RUNS, STEPS
from harness import Result, batches, differences, ds_config, engine_for, half_up, llama, same_bits, train, unequal

from ds_slide.errors import SlideError

WORKER = "compression_ranks_worker.py"
# Run, and the run whose bits it has.
SAME_BITS = {
    "delays": "clipping",
    "ssd": "clipping",
    "rounded-ssd": "rounded",
    "permutations": "exact",
    "permutations-immediate": "exact-immediate",
    "odd-delays": "odd",
    "resumed": "went on",
}

SLOW = ("delays", "immediate", "ssd", "permutations-immediate", "exact-immediate")
"""Each beside another run: of odd matrices, with rounded masters, and with clipping."""

OfRanks = Callable[[str], list[Result]]


def runs(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    always = [name for name in RUNS if name not in SLOW]
    names = [name for name in two_ranks.names_asked_for(request, SAME_BITS) if name in RUNS]
    return two_ranks.run(WORKER, tmp_path_factory.mktemp("ranks"), *dict.fromkeys([*always, *names]))


@pytest.fixture(scope="module")
def of_ranks(seen: list[dict[str, Any]]) -> OfRanks:
    """Results of a run by rank."""

    def results(name: str) -> list[Result]:
        return [Result(**{key: each[name][key] for key in ("losses", "norms", "states")}) for each in seen]

    return results


@pytest.mark.parametrize("name", runs(*RUNS, "odd", "odd-delays", "went on", "resumed"))
def test_all_ranks_have_the_same_weights(of_ranks: OfRanks, name: str) -> None:
    first, second = of_ranks(name)
    assert first.losses != second.losses  # each its own half of the data
    assert first.norms == second.norms
    assert unequal(first.states, second.states) == []
    for state in first.states.values():  # of the parts of both ranks; the weights are a rank's own
        assert unequal(state["weight"], half_up(state["master"]) if name != "fp32" else state["master"]) == []


@pytest.mark.parametrize("name", runs(*SAME_BITS))
def test_placement_timing_and_permutations_change_no_bit(of_ranks: OfRanks, name: str) -> None:
    for found, expected in zip(of_ranks(name), of_ranks(SAME_BITS[name]), strict=True):
        assert differences(found, expected) == []
        assert found.norms == expected.norms


def test_projectors_are_fitted_alike(seen: list[dict[str, Any]]) -> None:
    first, second = (each["clipping"]["statistics"] for each in seen)
    assert first == second
    assert (first["checks"], first["refits"]) == (STEPS // 2 * BLOCKS, STEPS // 2 * BLOCKS * 7)
    assert first["bytes_down"] == BLOCKS * 2 * (5 * 192 + 2 * 128)  # half of 289 and of 256, in whole lines
    assert first["bytes_up"] == BLOCKS * 4 * (5 * 320 + 2 * 256)


def test_norms_are_clipped(of_ranks: OfRanks) -> None:
    assert max(of_ranks("clipping")[0].norms) > 1.0


@pytest.mark.usefixtures("one_rank", "quick_fits")
@pytest.mark.parametrize(("name", "tolerance"), [("fp32", 2.0**-14), ("accumulation", 2.0**-7)])
def test_against_one_rank_with_the_whole_batch(of_ranks: OfRanks, name: str, tolerance: float) -> None:
    slide, settings = RUNS[name]
    halves = batches(2 * STEPS * settings.get("accumulation", 1))
    whole = [
        {key: torch.cat([left[key], right[key]]) for key in left}
        for left, right in zip(halves[::2], halves[1::2], strict=True)
    ]
    config = ds_config({"window": 2, **slide}, **settings, train_micro_batch_size_per_gpu=4)
    with engine_for(llama(num_hidden_layers=BLOCKS), config) as engine:
        alone = train(engine, whole)
    first, second = of_ranks(name)
    together = [(left + right) / 2 for left, right in zip(first.losses, second.losses, strict=True)]
    assert together == pytest.approx(alone.losses, abs=tolerance)
    # Each rank has lost another part of its gradient than of their mean is lost.
    assert first.norms == pytest.approx(alone.norms, rel=0.05)


def test_a_step_that_is_not_finite_on_one_rank_is_taken_by_none(seen: list[dict[str, Any]]) -> None:
    for each in seen:
        overflow, states = each["skipped"]
        assert overflow and unequal(states, each["resumed"]["states"]) == []


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_written_weights_are_the_same_everywhere_and_afterwards(seen: list[dict[str, Any]], kind: str) -> None:
    first, second = (each["written"][kind] for each in seen)
    saved, value = first["saved"], first["value"]
    assert unequal(saved, second["saved"]) == []
    assert (saved["layers.0.0.weight"]["master"] == 0.5).all()
    assert same_bits(saved["layers.1.2.weight"]["master"], half_up(value).float() if kind == "bf16" else value)
    assert unequal({name: state["master"] for name, state in saved.items()}, first["fp32"]) == []
    weights = {name: state["weight"] for name, state in saved.items()}
    assert unequal(weights, first["16 bit"]) == []
    for each in (first, second):
        assert unequal(weights, {name: state["weight"] for name, state in each["weights alone"].items()}) == []
        assert unequal(each["went on"]["states"], each["resumed"]["states"]) == []
        assert each["went on"]["losses"] == each["resumed"]["losses"]
    assert unequal(first["resumed"]["states"], second["resumed"]["states"]) == []


def test_all_ranks_refuse_a_tag_that_lacks_the_part_of_one(seen: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(seen):
        said = each["written"]["bf16"]["lacking"]
        assert "has no ds_slide_compression_1.pt, which holds rank 1's part" in said
        assert said.startswith("rank 1: ") == (rank == 0)


def test_masters_are_what_fits_on_the_rank_with_the_least_memory(seen: list[dict[str, Any]]) -> None:
    rounded, chosen = seen[0]["little memory"]
    assert chosen == rounded and rounded[0] > 0
    assert seen[1]["little memory"] == [rounded, rounded]


def test_they_need_memory_that_all_of_them_read(seen: list[dict[str, Any]]) -> None:
    for each in seen:
        as_asked, elsewhere = each["refused"]
        assert "ds_slide.share_weights is false and there are 2 ranks" in as_asked
        assert "ds_slide.compression is set for several ranks, but the ranks cannot share host memory" in elsewhere


@pytest.mark.usefixtures("one_rank")
def test_other_numbers_of_ranks_load_the_weights_alone(folder: Path) -> None:
    with engine_for(llama(num_hidden_layers=BLOCKS), ds_config({"compression": LSP})) as engine:
        with pytest.raises(SlideError, match="was saved by 2 ranks and is loaded by 1"):
            engine.load_checkpoint(folder / "checkpoints")
        engine.load_checkpoint(folder / "checkpoints", load_optimizer_states=False)
