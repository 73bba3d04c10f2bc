"""Two ranks over gloo: plain copies of the model, and checkpoints of another number of ranks."""

from __future__ import annotations

import pytest
from harness import ds_config, engine_for, unequal
from world_two_worker import OddModel, freeze

from ds_slide.errors import SlideError

WORKER = "copies_worker.py"


@pytest.mark.parametrize("name, ranks", [("shared", [0]), ("gathered", [0, 1])])
def test_a_copy_has_whole_weights_and_keeps_them(name, ranks, seen):
    for rank in ranks:
        assert unequal(seen[rank][name], seen[rank][f"{name}, expected"]) == []
        assert unequal(seen[rank][f"{name}, later"], seen[rank][name]) != []


@pytest.mark.parametrize("name", ["shared", "gathered"])
def test_a_checkpoint_of_one_rank_is_refused_by_both_in_the_same_sentence(name, seen):
    for rank in range(2):
        message = seen[rank][f"{name}, refused"]
        assert "was saved by 1 rank and is loaded by 2" in message and "ds_to_universal.py" in message


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_of_two_ranks_is_refused_by_one(folder):
    with engine_for(freeze(OddModel()), ds_config({"window": 2})) as engine:
        with pytest.raises(SlideError, match=r"was saved by 2 ranks and is loaded by 1, .*ds_to_universal\.py"):
            engine.load_checkpoint(folder / "of two", "shared")
        engine.load_checkpoint(folder / "of two", "shared", load_optimizer_states=False)
