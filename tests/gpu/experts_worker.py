"""Trainings and generations of mixtures whose experts move in parts, whole, or not at all, for test_experts.py.

python experts_worker.py FILE, with tests/support in PYTHONPATH
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from fused_experts import adapted_mixture, mixture, with_packed_experts
from harness import batches, ds_config, plain_training

ON_CPU = os.environ.get("DS_ACCELERATOR") == "cpu"
WIDTH, INNER, EXPERTS, BLOCKS, STEPS = 512, 512, 32, 4, 6
EXPERT_BYTES = 3 * WIDTH * INNER * 2
# Three of 32 experts at a time, and random delays, which show a buffer that is filled before it has been read.
DELAYS = {"debug": {"lane_delay_ms": 2.0, "seed": 1}}
SLIDE: dict[str, dict[str, Any]] = {
    "parts": {"window": 2, "gpu_states": 0, "experts": 3 * EXPERT_BYTES} | DELAYS,
    "whole": {"window": 2, "gpu_states": 0, "kernels": "off"},
    "few": {"window": 2, "gpu_states": 0} | DELAYS,
}
SIZES = {
    "qwen3": {"moe_intermediate_size": INNER, "num_experts": EXPERTS, "num_experts_per_tok": 4},
    "gpt-oss": {"intermediate_size": INNER, "num_local_experts": EXPERTS, "num_experts_per_tok": 4},
}
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "pad_token_id": 0}


def model_of(shape: str, implementation: str) -> Any:
    shape, _, adapters = shape.partition(" ")
    make = adapted_mixture if adapters else mixture
    model = make(shape, implementation, None, hidden_size=WIDTH, num_hidden_layers=BLOCKS, **SIZES[shape])
    return with_packed_experts(model) if adapters == "packed" else model


def trained(shape: str, implementation: str, way: str) -> dict[str, Any]:
    device = torch.device("cpu" if ON_CPU else "cuda")
    model = model_of(shape, implementation)
    data = [{key: value.to(device) for key, value in batch.items()} for batch in batches(STEPS)]
    prompt = data[0]["input_ids"][:1, :6]
    if way == "plain":
        result = plain_training(model.to(device), data, 1.0)
        return {"losses": result.losses}
    config = ds_config(SLIDE[way] | {"kernels": "off"})
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=[
        parameter for parameter in model.parameters() if parameter.requires_grad
    ])  # fmt: skip
    model.eval()
    with torch.no_grad():
        tokens = engine.module.generate(prompt, **OPTIONS)
    model.train()
    losses = []
    for batch in data:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    statistics = engine.optimizer.slide_stats()
    engine.destroy()
    up, memory = statistics["lanes"]["h2d"]["bytes"], statistics["memory"]
    return {"losses": losses, "tokens": tokens.tolist(), "up": up, "window": memory["window_bytes"]}


def main() -> None:
    found = {
        f"{shape} {implementation} {way}": trained(shape, implementation, way)
        for shape in (*SIZES, "qwen3 adapters")  # `target_parameters`
        for implementation in ("grouped_mm", "eager")
        for way in ("plain", *SLIDE)
    }
    for way in ("plain", "whole"):  # packed experts do not move in parts
        found[f"qwen3 packed {way}"] = trained("qwen3 packed", "grouped_mm", way)
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
