"""States on SSD and checkpoints on a file system that a process serves, without nameless files: as on any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import Result, batches, differences, ds_config, engine_for, llama, on_ssd, states_of, train, trained

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 2


def config_of(states: Path) -> dict[str, Any]:
    return on_ssd(ds_config({"host_memory": 0}), states)


def test_states_and_checkpoints_have_the_same_bits(over_fuse: Path) -> None:
    states, saves = over_fuse / "states", over_fuse / "saves"
    data = batches(2 * STEPS)
    with engine_for(llama(), config_of(states)) as engine:
        half = train(engine, data[:STEPS])
        assert all(path.name.startswith(".fuse_hidden") for path in states.iterdir())
        engine.save_checkpoint(str(saves), tag="first")
        engine.save_checkpoint(str(saves), tag="first")  # exchanges it
    assert list(states.iterdir()) == []
    assert list(saves.glob(".*")) == []
    with engine_for(llama(seed=1), config_of(states)) as engine:
        engine.load_checkpoint(str(saves))
        rest = train(engine, data[STEPS:])
        found = Result(half.losses + rest.losses, half.norms + rest.norms, states_of(engine.module))
    assert list(states.iterdir()) == []
    assert differences(found, trained(llama(), ds_config({}), data)) == []
