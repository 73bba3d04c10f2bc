"""Saves on 1, 2 and 4 ranks, converts, and loads on 1, 2 and 4 ranks (gloo, CPU), for test_universal_ranks.py.

    python universal_worker.py FOLDER

Each rank leaves what it saw in FOLDER/save<WORLD>/rank<N>.pt, and where it loaded in FOLDER/load<WORLD>/rank<N>.pt.
Every parameter has an odd number of elements, so that partitions end in padding, of other sizes in each world.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import two_ranks
from harness import ds_config, engine_for, on_ssd, states_of
from torch import nn
from universal import convert, universal
from world_two_worker import OddModel, freeze, tokens_of, train

WORLDS = (1, 2, 4)
SAVED_STEPS = 3
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 6}}
SAVED_BY = ("slide", "stock")
# The "ds_slide" block of those that load.
PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "gathered": {"share_weights": False},
    "gpu": {"gpu_states": 60_000},
    "ssd": {"host_memory": 0},
}


def loads(target: int) -> list[tuple[str, int, str]]:
    """Place, world that has saved, and by whom: all into host memory, one other world's into each other place."""
    other = 1 if target == 4 else 4
    everything = [("host", source, by) for source in WORLDS for by in SAVED_BY]
    return everything + [(place, other, "slide") for place in PLACES if place != "host"]


def build(seed: int) -> OddModel:
    """Frozen weights are the same for each seed."""
    model = OddModel(seed)
    model.embed = freeze(OddModel(0)).embed
    model.layers[2].up = freeze(OddModel(0)).layers[2].up
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors = [parameter for parameter in trained if parameter.ndim == 1]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1]},
        {"params": vectors, "weight_decay": 0.0, "betas": [0.8, 0.9]},
    ]


def engine_of(slide: dict[str, Any] | None, seed: int, disk: Path | None = None, **others: Any) -> Any:
    """Stock without `slide`. Stock's universal load gives all groups the settings of the first, so it has one."""
    model = build(seed)
    config = ds_config(None if slide is None else {"window": 2, **slide}, scheduler=WARMUP, **others)
    config["zero_optimization"]["sub_group_size"] = 5_000
    if disk is not None:
        on_ssd(config, disk)
    return engine_for(model, config, model_parameters=groups_of(model))


def seen_of(engine: Any) -> dict[str, Any]:
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups
    ]
    return {
        "states": states_of(engine.module),
        "groups": groups,
        "scheduler": engine.lr_scheduler.state_dict(),
        "steps": engine.global_steps,
    }


def save(rank: int, folder: Path, world: int) -> None:
    with two_ranks.as_rank(rank, folder, world) as seen:
        for by in SAVED_BY:
            with engine_of({} if by == "slide" else None, 0) as engine:
                train(engine, tokens_of(rank, SAVED_STEPS))
                engine.save_checkpoint(folder / by, "tag")
                seen[by] = seen_of(engine)


def load(rank: int, folder: Path, world: int) -> None:
    (folder / f"disk{rank}").mkdir()
    with two_ranks.as_rank(rank, folder, world) as seen:
        for place, slide in PLACES.items():
            disk = folder / f"disk{rank}" if place == "ssd" else None
            with engine_of(slide, 7, disk, **universal({})) as engine:
                for wanted, source, by in loads(world):
                    if wanted == place:
                        engine.load_checkpoint(folder.parent / f"save{source}" / by)
                        result = seen_of(engine)
                        result["step"] = engine.optimizer.runtime.step_count
                        result["losses"] = train(engine, tokens_of(rank, 2))
                        seen[f"{by} {source} {place}"] = result
        with engine_of(None, 7, **universal({})) as engine:
            for source in WORLDS:
                engine.load_checkpoint(folder.parent / f"save{source}" / "slide")
                seen[f"slide {source} stock"] = {"states": states_of(engine.module)}


def main() -> None:
    folder = Path(sys.argv[1])
    for phase in (save, load):
        for world in WORLDS:
            (folder / f"{phase.__name__}{world}").mkdir()
            main_of_rank = functools.partial(phase, world=world)
            two_ranks.fork_world(world, main_of_rank, folder / f"{phase.__name__}{world}")
            if phase is save:
                for by in SAVED_BY:
                    convert(folder / f"save{world}" / by, "tag")


if __name__ == "__main__":
    main()
