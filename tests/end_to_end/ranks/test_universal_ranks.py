"""Universal checkpoints of 1, 2 and 4 ranks, loaded on 1, 2 and 4 ranks: every state is that which was saved."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import two_ranks
from harness import Result, differences, exchanged, unequal
from universal_worker import PLACES, SAVED_STEPS, WORLDS, loads

pytestmark = pytest.mark.slow

worlds = pytest.mark.parametrize(("source", "target"), list(itertools.product(WORLDS, WORLDS)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_ranks.run("universal_worker.py", tmp_path_factory.mktemp("universal"), timeout_s=600)


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each world saw, by phase and world."""
    return {
        f"{p}{world}": two_ranks.seen_by(folder / f"{p}{world}", world) for p in ("save", "load") for world in WORLDS
    }


@pytest.mark.parametrize(
    ("target", "place", "source", "by"), [(target, *load) for target in WORLDS for load in loads(target)]
)
def test_every_state_is_the_one_that_was_saved(by, place, source, target, seen):
    saved = seen[f"save{source}"][0][by]
    states = saved["states"] if by == "slide" else exchanged(saved["states"], to_stock=False)
    for rank in seen[f"load{target}"]:
        loaded = rank[f"{by} {source} {place}"]
        assert unequal(loaded["states"], states) == []
        assert loaded["step"] == loaded["steps"] == saved["steps"] == SAVED_STEPS
        assert loaded["scheduler"] == saved["scheduler"]
        assert loaded["groups"] == saved["groups"] and len(saved["groups"]) == 2


@worlds
def test_stock_loads_ours(source, target, seen):
    saved = Result(states=exchanged(seen[f"save{source}"][0]["slide"]["states"], to_stock=True))
    for rank in seen[f"load{target}"]:
        assert differences(Result(states=rank[f"slide {source} stock"]["states"]), saved) == []


@pytest.mark.parametrize("target", WORLDS)
def test_training_goes_on_the_same_wherever_states_live(target, seen):
    source = loads(target)[-1][1]
    for rank in seen[f"load{target}"]:
        losses = {place: rank[f"slide {source} {place}"]["losses"] for place in PLACES}
        assert losses["gathered"] == losses["ssd"] == losses["host"]
        assert losses["gpu"] == pytest.approx(losses["host"], rel=2e-3)
