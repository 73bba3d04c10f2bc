"""One of two ranks (gloo, CPU) that train adapters on packed weights, for test_packed_ranks.py.

python packed_ranks_worker.py FOLDER NAMES

NAMES: a kind of packed weights and a name of `WAYS` each, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import packed
import torch
import two_ranks
from harness import batches, ds_config, engine_for, on_ssd, states_of, train

import ds_slide.model.carried
from ds_slide.model.subclasses import take_apart

STEPS = 2
WAYS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "shared": {"window": 3, "gpu_states": 0},
    "gathered": {"window": 3, "gpu_states": 0, "share_weights": False},
    "ssd": {"window": 3, "gpu_states": 0, "host_memory": 0},
    "gpu": {"gpu_states": 2_000_000},
}
LAYER = "model.layers.2.mlp.up_proj."


def beside(model: Any) -> dict[str, torch.Tensor]:
    """What is beside the packed weights of a layer, as a script reads it."""
    layer = model.get_submodule(LAYER[:-1])
    return {
        each.name: each.tensor.detach().clone() for each in ds_slide.model.carried.find_carried(layer).get(layer, [])
    }


def main(rank: int, folder: Path) -> None:
    ds_slide.model.carried.LEAST_BYTES = 256  # the models are small, so tensors beside their packed weights are
    with two_ranks.as_rank(rank, folder) as results:
        for kind, way in json.loads(sys.argv[2]):
            config, data = ds_config(WAYS[way]), batches(2 * STEPS)[rank::2]
            if way == "ssd":
                (folder / "ssd").mkdir(exist_ok=True)
                on_ssd(config, folder / "ssd")
            model = packed.packed_model(kind, num_hidden_layers=4)
            if kind in packed.SUBCLASSES:  # as the engine does; to see what is beside the weights before
                take_apart(model)
            whole, found = beside(model), {}
            with engine_for(model, config) as engine:
                result = train(engine, data, packed.forward_between)
                if way != "stock":
                    saved = model.get_submodule(LAYER[:-1]).state_dict()
                    found = {"between": beside(model), "saved": {name: each.clone() for name, each in saved.items()}}
                    found["moves"] = [
                        each.name for unit in engine.optimizer.runtime.blocks for each in unit.spec.carried
                    ]
                    with deepspeed.zero.GatheredParameters(list(model.get_submodule(LAYER[:-1]).parameters())):
                        found["gathered"] = beside(model)
                result.states = states_of(model)
            results[f"{kind} {way}"] = {"losses": result.losses, "states": result.states, "whole": whole} | found
            if way in ("shared", "gathered"):  # another engine of the same model, and one that loads its checkpoint
                with engine_for(model, config) as engine:
                    losses = train(engine, data[:1], packed.forward_between).losses
                    engine.save_checkpoint(folder / kind / way)
                    losses += train(engine, data[1:], packed.forward_between).losses
                model = packed.packed_model(kind, num_hidden_layers=4)
                scales = [each for name, each in model.named_buffers() if name.endswith(".scales")]
                for each in (*scales, *(p.data for p in model.parameters() if p.requires_grad)):
                    each.zero_()
                with engine_for(model, config) as engine:
                    engine.load_checkpoint(folder / kind / way, load_module_strict=False)
                    resumed = train(engine, data[1:], packed.forward_between).losses
                results[f"{kind} {way} again"] = {"losses": losses, "resumed": resumed}


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
