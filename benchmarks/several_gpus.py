"""Train with one process a GPU, one setting after the other in the same processes, and write a JSON line for each.

    deepspeed --num_gpus 2 benchmarks/several_gpus.py --plan hang-3b --out out/two.jsonl
    deepspeed --num_gpus 4 benchmarks/several_gpus.py --plan four --limit 90 --go-on --out out/four.jsonl

Every rank has batches of its own (`batch` and `seq` of a setting are those of one GPU). A line has rank 0's step times
and the mean of the ranks' losses of every step, so that settings compare loss by loss. A line is written when a setting
begins, and another as soon as it has ended. A setting that fails ends the processes; started again with `--go-on`, they
do the settings that have not begun. `ranks_page.py` prints what a file of lines says.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import gc
import json
import logging
import os
import re
import statistics
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lengths
import memory
import shapes
import step
import torch
import torch.distributed as dist
from clock import PhaseClock
from settings import Setting
from trainers import Batch, DeepSpeedTrainer, arguments_of

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


def side_by_side(steps: int, warmup: int = 9, **shape: Any) -> list[Setting]:
    """What is compared on one, two and four GPUs. The first rows matter most."""
    timed: dict[str, Any] = {"steps": steps, "warmup": warmup, **shape}
    # One micro-batch never comes twice, so that lengths do not repeat either.
    varying: dict[str, Any] = {"batch": 1, "grad_accum": 4, "shortest": 64, "distinct_batches": 4 * (steps + warmup)}
    return [
        Setting("slide", clip=1.0, **timed),
        Setting("slide", clip=1.0, **(timed | varying)),
        Setting("slide", batch=2, grad_accum=4, clip=1.0, **timed),
        Setting("slide", clip=0.0, **timed),
        Setting("slide", batch=2, grad_accum=4, clip=0.0, **timed),
        Setting("slide", batch=1, grad_accum=4, clip=1.0, **timed),
        Setting("slide", clip=0.0, **(timed | varying)),
    ]


def recorded(steps: int, warmup: int, **shape: Any) -> list[Setting]:
    """One sequence a micro-batch, with blocks that replay recordings and without: one length, and twelve in turn."""
    small: dict[str, Any] = {"batch": 1, "grad_accum": 4, "clip": 1.0, "steps": steps, "warmup": warmup, **shape}
    return [
        Setting("slide", slide={"captured_blocks": records}, **small, **lengths)
        for lengths in ({}, {"shortest": 256, "distinct_batches": 12})
        for records in (True, False)
    ]


def large(steps: int, *models: str, **shape: Any) -> list[Setting]:
    return [Setting("slide", model, build="partitioned", steps=steps, warmup=3, **shape) for model in models]


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
        "four": side_by_side(41),
        "four-rest": side_by_side(41)[3:],
        "four-fewer": side_by_side(11),
        "four-fewer-rest": side_by_side(11)[3:],
        "four-stock": [Setting("stock", clip=1.0, steps=8, warmup=2)],
        "recorded": recorded(8, 14),
        "tiny-recorded": recorded(2, 1, model="tiny", seq=512),
        "large-7b": large(5, "qwen2.5-7b"),
        "large-14b": large(4, "qwen2.5-14b"),
        "large-lora": large(4, "qwen2.5-32b", adapter=16, batch=4),
        "images": [Setting("slide", "qwen2.5-vl-3b", images=2, batch=4, steps=11, warmup=9)],
        "tiny-four": side_by_side(3, warmup=2, model="tiny", seq=128),
        "tiny-four-stock": [Setting("stock", "tiny", seq=128, steps=3, warmup=2)],
        "tiny-four-rest": side_by_side(3, warmup=2, model="tiny", seq=128)[3:],
        "tiny-four-fewer-rest": side_by_side(3, warmup=2, model="tiny", seq=128)[3:],
        "tiny-four-fewer": side_by_side(3, warmup=2, model="tiny", seq=128),
        "tiny-large-7b": large(2, "tiny", seq=64),
        "tiny-large-lora": large(2, "tiny", seq=64, adapter=4),
        "tiny-images": [Setting("slide", "tiny-vl", images=2, batch=2, seq=64, steps=18, warmup=2)],
        "tiny": crossed("tiny", "slide", 2, [{}, HOST], seq=64),
        "tiny-stock": crossed("tiny", "stock", 2, [{}], seq=64),
    }


def mean_over_ranks(values: list[float], device: torch.device) -> list[float]:
    there = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(there)
    return [float(value) for value in there / dist.get_world_size()]


def own_batches(setting: Setting, model: Any, device: torch.device) -> Sequence[Batch]:
    """This rank's micro-batches."""
    rank = dist.get_rank()
    if setting.model in shapes.VISION_LANGUAGE:
        case = "vision" if rank < setting.images else "vision-text"
        maker = lengths.Batches(case, model, setting.batch, setting.seq)
        maker.generator.manual_seed(setting.seed + 1 + 1000 * rank)
        return [maker.make(maker.length()) for _ in range(setting.distinct_batches)]
    own = dataclasses.replace(setting, seed=setting.seed + 1000 * rank)
    return step.token_batches(own, model.config.vocab_size, device)


def tokens_of_steps(batches: Sequence[Batch], setting: Setting) -> list[list[int]]:
    """Tokens of each step, of every rank."""
    counts = [arguments_of(batch)["input_ids"].numel() for batch in batches]
    accumulation = setting.grad_accum
    own = [
        sum(counts[(number * accumulation + micro) % len(counts)] for micro in range(accumulation))
        for number in range(setting.warmup + setting.steps)
    ]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, own)
    return of_all


class Said(logging.Handler):
    """The engine's own lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(setting: Setting, device: torch.device) -> dict[str, Any]:
    begin = time.perf_counter()
    model = step.prepare_model(setting, device)
    build_s = time.perf_counter() - begin
    batches = own_batches(setting, model, device)
    trainer = DeepSpeedTrainer(model, setting, setting.nvme_path)
    init_s = time.perf_counter() - begin
    memory.restart_gpu_peak()
    log = step.StepLog()
    step.run_steps(trainer, batches, setting, setting.warmup + setting.steps, PhaseClock(False), log)
    step.synchronize(device)
    timed = log.step_s[setting.warmup :]
    tokens = tokens_of_steps(batches, setting)
    mean_tokens = statistics.mean(sum(own[setting.warmup :]) / setting.steps for own in tokens) * len(tokens)
    record = {
        "ranks": dist.get_world_size(),
        "build_s": build_s,
        "init_s": init_s,
        "step_s": statistics.median(timed),
        "step_s_min": min(timed),
        "step_s_max": max(timed),
        "step_s_all": log.step_s,
        "tokens": tokens,
        "tokens_per_s": mean_tokens / statistics.median(timed),
        "losses": mean_over_ranks([float(loss) for loss in log.losses], device),
        "grad_norms": [None if norm is None else float(norm) for norm in log.grad_norms],
        "memory": memory.snapshot(),
        "slide_stats": log.engine[-1],
    }
    if setting.system == "slide":
        record["update_threads"] = trainer.engine.optimizer.runtime.parts.context.cpu_threads
    trainer.engine.destroy()
    return record


def begun(out: Path) -> list[dict[str, Any]]:
    """The settings that a file has lines of, with the number of ranks."""
    lines = out.read_text().splitlines() if out.exists() else []
    return [{key: record[key] for key in ("setting", "ranks")} for record in map(json.loads, lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, help="several of them with commas")
    parser.add_argument("--only", default="", help="a pattern in the options of a setting")
    parser.add_argument("--nvme-path", default="", help="folder on the disk, for settings with states there")
    parser.add_argument("--limit", type=float, default=0, help="seconds of a setting; then all stacks are printed")
    parser.add_argument("--go-on", action="store_true", help="leave out settings that --out has lines of")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    arguments = parser.parse_args()
    device = step.begin_rank(arguments.local_rank)
    every = plans(arguments.nvme_path)
    chosen = [setting for name in arguments.plan.split(",") for setting in every[name]]
    done = begun(arguments.out) if arguments.go_on else []
    dist.barrier()  # nobody writes before all have read

    def write(line: dict[str, Any]) -> None:
        with arguments.out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    for setting in chosen:
        line: dict[str, Any] = {"setting": vars(setting.shown()), "ranks": dist.get_world_size()}
        if line in done or not re.search(arguments.only, " ".join(setting.arguments())):
            continue
        said = Said()
        if dist.get_rank() == 0:
            step.note(setting.command())
            logging.getLogger("ds_slide").addHandler(said)
            write(line | {"status": "begun"})
        if arguments.limit:
            faulthandler.dump_traceback_later(arguments.limit, exit=True)
        try:
            record = line | {"status": "ok"} | run(setting, device) | {"said": said.lines}
        except Exception as error:
            # The other ranks wait in a collective: the launcher ends them when this process has ended.
            traceback.print_exc()
            what = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"[:600]
            write(line | {"status": "failed", "error": what, "said": said.lines})
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()
        logging.getLogger("ds_slide").removeHandler(said)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            step.note(
                f"{record['step_s']:.3f} s a step, losses {record['losses'][0]:.4f} to {record['losses'][-1]:.4f}"
            )
            write(record)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
