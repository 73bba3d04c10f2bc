"""Train with one process a GPU, one setting after the other in the same processes, and write a JSON line for each.

    deepspeed --num_gpus 2 benchmarks/several_gpus.py --plan hang-3b --out out/two.jsonl
    deepspeed --num_gpus 2 benchmarks/several_gpus.py --plan speed --only stock --out out/two.jsonl

Every rank has batches of its own (`batch` and `seq` of a setting are those of one GPU). A line has rank 0's step times
and the mean of the ranks' losses of every step, so that settings compare loss by loss. The lines are written as soon as
a setting has ended: a run that hangs keeps what it has, and shows which setting it was in.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import step
import torch
import torch.distributed as dist
from clock import PhaseClock
from settings import Setting
from trainers import DeepSpeedTrainer

HOST: dict[str, Any] = {"gpu_states": 0}
ON_SSD: dict[str, Any] = {"gpu_states": 0, "host_memory": 0}


def crossed(
    model: str, system: str, steps: int, blocks: list[dict[str, Any]], warmup: int = 2, **shape: Any
) -> list[Setting]:
    """Clipping or not, one micro-batch or four of a quarter of the size, each with every "ds_slide" block."""
    return [
        Setting(
            system, model, batch=8 // accumulation, grad_accum=accumulation, clip=clip, steps=steps, warmup=warmup,
            slide=block, **shape,
        )
        for block in blocks
        for clip in (0.0, 1.0)
        for accumulation in (1, 4)
    ]  # fmt: skip


def plans(nvme_path: str) -> dict[str, list[Setting]]:
    on_disk: dict[str, Any] = {"offload": "nvme", "nvme_path": nvme_path}
    speed: dict[str, Any] = {"steps": 12, "warmup": 3}
    return {
        "hang-3b": crossed("qwen2.5-3b", "slide", 48, [{}, HOST]),
        "key-alone": crossed("qwen2.5-3b", "slide", 10, [{}], warmup=9),
        "hang-ssd": crossed("qwen2.5-0.5b", "slide", 8, [ON_SSD, {"host_memory": 0}], **on_disk),
        "stock-3b": crossed("qwen2.5-3b", "stock", 10, [{}]),
        "stock-0.5b": crossed("qwen2.5-0.5b", "stock", 8, [{}]),
        "speed": [Setting("slide", clip=clip, **speed) for clip in (1.0, 0.0)],
        "speed-gathered": [Setting("slide", clip=clip, slide={"share_weights": False}, **speed) for clip in (1.0, 0.0)],
        "lsp": [
            Setting("slide", batch=2, clip=1.0, **speed, slide={"gpu_states": 0, "compression": compression})
            for compression in (None, {"type": "lsp", "d": 704, "r": 4})
        ],
        "speed-stock": [Setting("stock", clip=1.0, **speed)],
        "transports": [
            Setting("slide", "qwen2.5-0.5b", batch=2, clip=clip, steps=4, warmup=1, slide={**block, **transport})
            for clip in (0.0, 1.0)
            for block in (HOST, {"gpu_states": "2GiB"})
            for transport in ({}, {"share_weights": False})
        ],
        "tiny": crossed("tiny", "slide", 2, [{}, HOST], seq=64),
        "tiny-stock": crossed("tiny", "stock", 2, [{}], seq=64),
    }


def mean_over_ranks(values: list[float], device: torch.device) -> list[float]:
    there = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(there)
    return [float(value) for value in there / dist.get_world_size()]


def run(setting: Setting, device: torch.device) -> dict[str, Any]:
    begin = time.perf_counter()
    model = step.prepare_model(setting, device)
    own = dataclasses.replace(setting, seed=setting.seed + 1000 * dist.get_rank())
    batches = step.token_batches(own, model.config.vocab_size, device)
    trainer = DeepSpeedTrainer(model, setting, setting.nvme_path)
    init_s = time.perf_counter() - begin
    log = step.StepLog()
    step.run_steps(trainer, batches, setting, setting.warmup + setting.steps, PhaseClock(False), log)
    step.synchronize(device)
    timed = log.step_s[setting.warmup :]
    record = {
        "ranks": dist.get_world_size(),
        "init_s": init_s,
        "step_s": statistics.median(timed),
        "step_s_min": min(timed),
        "step_s_max": max(timed),
        "tokens_per_s": dist.get_world_size() * setting.tokens_per_step / statistics.median(timed),
        "losses": mean_over_ranks([float(loss) for loss in log.losses], device),
        "grad_norms": [None if norm is None else float(norm) for norm in log.grad_norms],
        "slide_stats": log.engine[-1],
    }
    trainer.engine.destroy()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, help="several of them with commas")
    parser.add_argument("--only", default="", help="a pattern in the options of a setting")
    parser.add_argument("--nvme-path", default="", help="folder on the disk, for settings with states there")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    arguments = parser.parse_args()
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().set_device(arguments.local_rank)
    deepspeed.init_distributed()
    device = torch.device(get_accelerator().current_device_name())
    every = plans(arguments.nvme_path)
    chosen = [setting for name in arguments.plan.split(",") for setting in every[name]]
    for setting in chosen:
        if not re.search(arguments.only, " ".join(setting.arguments())):
            continue
        if dist.get_rank() == 0:
            step.note(setting.command())
        record = {"setting": vars(setting.shown())} | run(setting, device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            step.note(
                f"{record['step_s']:.3f} s a step, losses {record['losses'][0]:.4f} to {record['losses'][-1]:.4f}"
            )
            with arguments.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
