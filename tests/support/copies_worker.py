"""One of two ranks (gloo, CPU) of test_copies_ranks.py: leaves what it saw in FOLDER/rank<N>.pt.

python copies_worker.py FOLDER
"""

from __future__ import annotations

import copy
from pathlib import Path

import deepspeed
import torch
import two_ranks
from harness import ds_config, engine_for, states_of
from world_two_worker import OddModel, freeze, tokens_of, train

from ds_slide.errors import SlideError

SETTINGS = {"shared": {"window": 2}, "gathered": {"window": 2, "share_weights": False}}


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def main(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder) as seen:
        for name, slide in SETTINGS.items():
            with engine_for(freeze(OddModel()), ds_config(slide)) as engine:
                train(engine, tokens_of(rank, 2))
                # By itself where all weights are in memory that it can read: no other rank takes part.
                copied = copy.deepcopy(engine.module) if name == "gathered" or rank == 0 else None
                train(engine, tokens_of(rank, 1))
                seen[f"{name}, later"] = {key: each["weight"] for key, each in states_of(engine.module).items()}
                seen[name] = None if copied is None else weights_of(copied)
            with engine_for(freeze(OddModel()), ds_config(slide)) as engine:
                train(engine, tokens_of(rank, 2))
                seen[f"{name}, expected"] = {key: each["weight"] for key, each in states_of(engine.module).items()}
                engine.save_checkpoint(folder / "of two", name)
                # A tag that one rank has saved.
                if rank == 0:
                    tag = folder / "of one" / name
                    tag.mkdir(parents=True)
                    for path in (folder / "of two" / name).glob("*rank_0_*"):
                        (tag / path.name).write_bytes(path.read_bytes())
                deepspeed.comm.barrier()
                try:
                    engine.load_checkpoint(folder / "of one", name)
                except SlideError as error:
                    seen[f"{name}, refused"] = str(error)
                train(engine, tokens_of(rank, 1))  # it goes on


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
