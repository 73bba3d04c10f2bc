"""One of two ranks (gloo, CPU) that save asynchronously, for test_async_ranks.py: leaves what it saw in rank<N>.pt.

python async_ranks_worker.py FOLDER
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import deepspeed
import two_ranks
from checkpoint_worker import fault_of
from harness import ds_config, engine_for, states_of
from world_two_worker import OddModel, freeze, tokens_of, train

from ds_slide.checkpoint.publish import Agreement
from ds_slide.errors import SlideError
from ds_slide.integration import checkpoint_save


def latest(saves: Path) -> str:
    path = saves / "latest"
    return path.read_text() if path.exists() else ""


def hold_back(own: int, rank: int) -> threading.Event:
    """From now on the thread of `rank` stands still after its last file, until the event is set."""
    go = threading.Event()

    def reached(phase: str) -> None:
        if own == rank and phase.startswith("wrote") and "optim" in phase:
            go.wait()

    checkpoint_save.reached = reached
    return go


def fail_on(own: int, rank: int) -> None:
    def reached(phase: str) -> None:
        if own == rank and phase.startswith("wrote"):
            raise SlideError("the disk of this rank is gone")

    checkpoint_save.reached = reached


def last_rank_publishes(rank: int, slow: int, engine: Any, saves: Path) -> dict[str, Any]:
    """`slow` ends last: until then there is no checkpoint, and then there is one although no rank has met another."""
    go = hold_back(rank, slow)
    engine.save_checkpoint(saves, f"slow{slow}")
    states = states_of(engine.module)
    train(engine, tokens_of(rank, 1))
    if rank != slow:
        engine.optimizer.saving.wait()
    deepspeed.comm.barrier()
    before = latest(saves)
    deepspeed.comm.barrier()
    go.set()
    engine.optimizer.saving.wait()
    deepspeed.comm.barrier()
    return {"states": states, "before": before, "after": latest(saves)}


def main(rank: int, folder: Path) -> None:
    saves = folder / "saves"
    config = ds_config({"window": 2, "async_save": True})
    with two_ranks.as_rank(rank, folder) as seen:
        with engine_for(freeze(OddModel()), config) as engine:
            train(engine, tokens_of(rank, 2))
            for slow in range(2):
                seen[f"slow{slow}"] = last_rank_publishes(rank, slow, engine, saves)
            for failing in range(2):
                fail_on(rank, failing)
                engine.save_checkpoint(saves, "broken")
                train(engine, tokens_of(rank, 1))
                fail_on(rank, -1)
                seen[f"{failing} fails"] = fault_of(engine.save_checkpoint, saves, "next")
                seen[f"{failing} fails: latest"] = latest(saves)
            deepspeed.comm.barrier()
            seen["left"] = sorted(path.name for path in saves.iterdir())
            deepspeed.comm.barrier()
            # A file system that shows each rank the other's files too late: nobody publishes before all ranks meet.
            publish = Agreement.publish_if_complete
            Agreement.publish_if_complete = lambda _self: None
            engine.save_checkpoint(saves, "late")
            engine.optimizer.saving.wait()
            Agreement.publish_if_complete = publish
            seen["late"] = latest(saves)
            engine.save_checkpoint(saves, "last")  # and that of `destroy`
            seen["not late"] = latest(saves)
        deepspeed.comm.barrier()
        seen["destroyed"] = latest(saves)
        with engine_for(freeze(OddModel(7)), ds_config({"window": 2})) as engine:
            for slow in range(2):
                engine.load_checkpoint(saves, f"slow{slow}")
                seen[f"slow{slow}"]["loaded"] = states_of(engine.module)


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
