"""The ranks of `test_many_ranks`: all of them train in several ways and write what came out to a file each.

python many_ranks_worker.py FOLDER WORLD NAME...
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import two_ranks
from harness import Batch, batches, causal_loss, ds_config, llama, on_ssd, trained

STEPS, BLOCKS = 3, 4
RUNS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "stock": (None, {"clip": 1.0}),
    "stock-accumulation": (None, {"clip": 1.0, "accumulation": 4}),
    "clipping": ({"window": 2}, {"clip": 1.0}),
    "immediate": ({"window": 2}, {"clip": 0.0}),
    "accumulation": ({"window": 2}, {"clip": 1.0, "accumulation": 4}),
    "delays": ({"window": 2, "debug": {"lane_delay_ms": 2.0, "seed": 3}}, {"clip": 1.0}),
    "gathered": ({"window": 2, "share_weights": False}, {"clip": 1.0}),
    "gpu-states": ({"window": 2, "gpu_states": 600_000}, {"clip": 1.0}),
    "ssd": ({"window": 2, "host_memory": 0}, {"clip": 1.0}),
    "immediate-gathered": ({"window": 2, "share_weights": False}, {"clip": 0.0}),
    "skipping": ({"window": 2}, {"clip": 0.0}),
    "skipping-delays": ({"window": 2, "debug": {"lane_delay_ms": 2.0, "seed": 5}}, {"clip": 0.0}),
}


class Skipping:
    """`causal_loss` of a model in which each rank leaves out another block, as layer drop does."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, engine: Any, batch: Batch) -> torch.Tensor:
        layers = engine.module.model.layers
        left_out = layers[(engine.global_steps + self._rank) % BLOCKS]
        kept = torch.nn.ModuleList([layer for layer in layers if layer is not left_out])
        engine.module.model.layers = kept
        engine.module.config.num_hidden_layers = len(kept)
        try:
            return causal_loss(engine, batch)
        finally:
            engine.module.model.layers = layers
            engine.module.config.num_hidden_layers = BLOCKS


def main(rank: int, folder: Path, world: int) -> None:
    with two_ranks.as_rank(rank, folder, world) as results:
        for name in sys.argv[3:]:
            slide, settings = RUNS[name]
            data = batches(world * STEPS * settings.get("accumulation", 1))
            config = ds_config(slide, **settings)
            if name == "ssd":
                on_ssd(config, folder / "disk")
            loss_of: Any = Skipping(rank) if name.startswith("skipping") else causal_loss
            # Each rank draws other weights: rank 0's have to win.
            model = llama(seed=rank, num_hidden_layers=BLOCKS)
            result = trained(model, config, data[rank::world], loss_of=loss_of)
            results[name] = {"losses": result.losses, "norms": result.norms, "states": result.states}


if __name__ == "__main__":
    world = int(sys.argv[2])
    two_ranks.fork_world(world, functools.partial(main, world=world), Path(sys.argv[1]))
