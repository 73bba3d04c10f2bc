"""One of two ranks (gloo, CPU) whose experts move in parts, for test_expert_ranks.py.

python expert_ranks_worker.py FOLDER
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import two_ranks
from fused_experts import EXPERT_BYTES, adapted_mixture, mixture
from harness import batches, ds_config, engine_for, states_of, train
from packed import forward_between

from ds_slide.errors import SlideConfigError

STEPS = 2
ADAPTED = "adapters on experts"
SHAPES = ("qwen3", "gpt-oss", ADAPTED)
WRITTEN = ("layers.1.mlp.experts.down_proj", "layers.1.mlp.experts.base_layer.base_layer.down_proj")
IN_PARTS = {"window": 2, "gpu_states": 0, "experts": 3 * EXPERT_BYTES}
WAYS: dict[str, dict[str, Any]] = {"parts": IN_PARTS, "whole": IN_PARTS | {"experts": 0}}


def main(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder) as results:
        for shape in SHAPES:
            for way, slide in WAYS.items():
                model = adapted_mixture("qwen3") if shape == ADAPTED else mixture(shape)
                data = batches(2 * 2 * STEPS)[rank::2]
                with engine_for(model, ds_config(slide)) as engine:
                    in_parts = engine.optimizer.runtime.parts.experts is not None
                    result = train(engine, data[:STEPS], forward_between)
                    (written,) = [p for name, p in model.named_parameters() if name.endswith(WRITTEN)]
                    with deepspeed.zero.GatheredParameters([written], modifier_rank=0):
                        if rank == 0:
                            written.data.mul_(1.5)
                    result.losses += train(engine, data[STEPS:], forward_between).losses
                    result.states = states_of(model)
                results[f"{shape} {way}"] = {
                    "losses": result.losses,
                    "states": result.states,
                    "in_parts": in_parts,
                }
        slide = IN_PARTS | {"share_weights": False}
        try:
            with engine_for(mixture("qwen3"), ds_config(slide)):
                pass
        except SlideConfigError as error:
            results["gathered"] = str(error)


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
