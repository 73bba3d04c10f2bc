"""Trains adapters on each of several packed bases, with plain torch and with DS-Slide. Not a test module.

python packed_worker.py RESULTS.json BASE...; the results are losses, kernels, and statistics of the last step.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import step
from clock import PhaseClock
from finetune_models import PRESETS
from settings import Setting
from trainers import DeepSpeedTrainer, apply_patch, make_trainer

# Wide enough that the scales of 8 bits move, too.
PRESETS["packed"] = {
    **PRESETS["tiny"], "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6
}  # fmt: skip
SHARED: dict[str, Any] = {
    "model": "packed", "adapter": 8, "batch": 2, "seq": 128, "steps": 8, "lr": 1e-3, "distinct_batches": 1
}  # fmt: skip
DEVICE = step.accelerator_device()


def trained(setting: Setting) -> dict[str, Any]:
    model = step.prepare_model(setting, DEVICE)
    tokens = step.token_batches(setting, PRESETS["packed"]["vocab_size"], DEVICE)
    patched = apply_patch(model, setting.patch)
    trainer, log = make_trainer(model, setting), step.StepLog()
    step.run_steps(trainer, tokens, setting, setting.steps, PhaseClock(False), log)
    if isinstance(trainer, DeepSpeedTrainer):
        trainer.engine.destroy()  # the process group stays: DeepSpeed takes no second one
    return {"losses": [float(loss) for loss in log.losses], "stats": log.engine[-1], "patched": patched}


def main(target: Path, bases: list[str]) -> None:
    results: dict[str, dict[str, Any]] = {}
    for base in bases:
        plain = Setting("gpu-only", base=base, patch="ours" if DEVICE.type == "cuda" else "", **SHARED)
        slide = Setting("slide", base=base, build="host", slide={"window": 2, "gpu_states": 0}, **SHARED)
        unasked = replace(slide, checkpointing="none")  # its blocks are recomputed in the first steps all the same
        results[base] = {"plain": trained(plain), "slide": trained(slide), "unasked": trained(unasked)}
    target.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
