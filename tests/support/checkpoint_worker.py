"""One of two ranks (gloo, CPU) of test_checkpoint_ranks.py: leaves what it saw in FOLDER/rank<N>.pt.

python checkpoint_worker.py FOLDER
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import deepspeed
import hostile_pickles
import two_ranks
from harness import ds_config, engine_for, states_of
from world_two_worker import OddModel, freeze, tokens_of, train

from ds_slide.checkpoint.manifest import NAME as MANIFEST
from ds_slide.errors import SlideError
from ds_slide.integration import checkpoint_save


def fault_of(action: Any, *arguments: Any) -> str:
    try:
        action(*arguments)
    except SlideError as error:
        return str(error)
    return ""


def fail_on(own: int, rank: int) -> None:
    """From now on, writing fails on `rank` after its first file."""

    def reached(phase: str) -> None:
        if own == rank and phase.startswith("wrote"):
            raise SlideError("the disk of this rank is gone")

    checkpoint_save.reached = reached


def main(rank: int, folder: Path) -> None:
    saves = folder / "saves"
    with two_ranks.as_rank(rank, folder) as seen, engine_for(freeze(OddModel()), ds_config({"window": 2})) as engine:
        train(engine, tokens_of(rank, 2))
        engine.save_checkpoint(saves, "whole")
        seen["states"] = states_of(engine.module)
        train(engine, tokens_of(rank, 1))
        for failing in range(2):
            fail_on(rank, failing)
            seen[f"save, {failing} fails"] = fault_of(engine.save_checkpoint, saves, "whole")
        fail_on(rank, -1)
        seen["left"] = sorted(path.name for path in saves.iterdir())
        engine.load_checkpoint(saves)
        seen["loaded"] = states_of(engine.module)
        engine.save_checkpoint(saves, "broken")
        deepspeed.comm.barrier()
        if rank == 0:
            path = saves / "broken" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
            data = bytearray(path.read_bytes())
            data[-2000] ^= 1
            path.write_bytes(data)
        deepspeed.comm.barrier()
        seen["load"] = fault_of(engine.load_checkpoint, saves)
        engine.load_checkpoint(saves, "whole", True, False)
        seen["weights"] = states_of(engine.module)
        deepspeed.comm.barrier()
        if rank == 0:
            shutil.copytree(saves / "whole", saves / "hostile", ignore=shutil.ignore_patterns(MANIFEST))
            path = saves / "hostile" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
            hostile_pickles.put(path, hostile_pickles.touching(folder / "marker"))
        deepspeed.comm.barrier()
        seen["hostile"] = fault_of(engine.load_checkpoint, saves, "hostile")
        seen["unchanged"] = states_of(engine.module)


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
