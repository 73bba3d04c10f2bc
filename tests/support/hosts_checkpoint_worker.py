"""One rank of `test_host_checkpoints`: saves, resumes and goes on.

python hosts_checkpoint_worker.py FOLDER RANKS shared|local|load:DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import two_ranks
from harness import batches, ds_config, engine_for, llama, states_of, train
from hosts_worker import as_rank
from universal import universal

STEPS = 2


def seen_of(engine: Any, losses: list[float]) -> dict[str, Any]:
    return {"losses": losses, "states": states_of(engine.module), "steps": engine.global_steps}


def resume(rank: int, ranks: int, saves: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Save in the middle of a training, and once more go on from there with another engine."""
    data = batches(2 * STEPS * ranks)[rank::ranks]
    with engine_for(llama(), config) as engine:
        train(engine, data[:STEPS])
        engine.save_checkpoint(saves, "tag")
        saved = states_of(engine.module)
        unbroken = seen_of(engine, train(engine, data[STEPS:]).losses)
    with engine_for(llama(seed=7), config) as engine:
        engine.load_checkpoint(saves)
        resumed = seen_of(engine, train(engine, data[STEPS:]).losses)
    return {"saved": saved, "unbroken": unbroken, "resumed": resumed}


def main(rank: int, folder: Path) -> None:
    ranks, what = int(sys.argv[2]), sys.argv[3]
    with as_rank(rank, ranks, folder) as (seen, _):
        config = ds_config({"window": 2})
        if what == "shared":
            seen |= resume(rank, ranks, folder / "saves", config)
        elif what == "local":
            # In /tmp, of which each host has its own.
            saves = Path("/tmp/saves")
            seen |= resume(rank, ranks, saves, config | {"checkpoint": {"use_node_local_storage": True}})
            seen["files"] = sorted(str(path.relative_to(saves)) for path in saves.rglob("*") if path.is_file())
        else:
            with engine_for(llama(seed=7), universal(config)) as engine:
                engine.load_checkpoint(what.partition(":")[2])
                seen["loaded"] = states_of(engine.module)


if __name__ == "__main__":
    two_ranks.fork_world(int(sys.argv[2]), main, Path(sys.argv[1]))
