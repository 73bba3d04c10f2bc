"""One of two ranks (gloo, CPU) that train adapters on MXFP4 bases, for test_mxfp4_ranks.py.

python mxfp4_ranks_worker.py FOLDER CHECKPOINT RUNS

RUNS: a name of `mxfp4.CASES` and one of `WAYS` each, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mxfp4
import two_ranks
from harness import batches, ds_config, engine_for, on_ssd, states_of, train
from packed import forward_between

STEPS = 2
WAYS: dict[str, dict[str, Any]] = {
    "shared": {"window": 2, "gpu_states": 0},
    "gathered": {"window": 2, "gpu_states": 0, "share_weights": False},
    "ssd": {"window": 2, "gpu_states": 0, "host_memory": 0},
}


def main(rank: int, folder: Path) -> None:
    checkpoint, data = Path(sys.argv[2]), batches(2 * STEPS)[rank::2]
    (folder / "ssd").mkdir(exist_ok=True)
    with two_ranks.as_rank(rank, folder) as results:
        for case, way in json.loads(sys.argv[3]):
            config, tag = ds_config(WAYS[way]), folder / case / way
            if way == "ssd":
                on_ssd(config, folder / "ssd")
            model = mxfp4.made(checkpoint, case)
            with engine_for(model, config) as engine:
                result = train(engine, data[:1], forward_between)
                engine.save_checkpoint(tag)
                result.losses += train(engine, data[1:], forward_between).losses
                states = states_of(model)
            model = mxfp4.made(checkpoint, case)
            for parameter in model.parameters():
                parameter.data.zero_()
            with engine_for(model, config) as engine:
                engine.load_checkpoint(tag)
                resumed = train(engine, data[1:], forward_between)
                resumed.states = states_of(model)
            results[f"{case} {way}"] = {
                "losses": result.losses,
                "states": states,
                "resumed": {"losses": resumed.losses, "states": resumed.states},
            }


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
