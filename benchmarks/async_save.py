"""Time training while a checkpoint is written by `ds_slide.async_save`, and print the record as one JSON line.

    python3 benchmarks/async_save.py --model qwen2.5-3b --batch 8 --seq 2048 --clip 1.0 --checkpointing reentrant \\
        --steps 20 --path DIR

The options are those of step.py; `--steps` are timed without a save. DIR gets two checkpoints, which are removed again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import settings
import step
import torch
from clock import PhaseClock
from settings import Setting
from trainers import Trainer, make_trainer


class Steps:
    """Runs steps of one trainer, and knows how long they take from one to the next."""

    def __init__(self, trainer: Trainer, batches: list[torch.Tensor], setting: Setting, device: torch.device) -> None:
        self._arguments = (trainer, batches, setting)
        self._device = device
        self._clock = PhaseClock(device.type == "cuda")
        self._log = step.StepLog()

    def run(self, count: int) -> float:
        """Seconds a step."""
        step.synchronize(self._device)
        begin = time.perf_counter()
        step.run_steps(*self._arguments, count, self._clock, self._log)
        step.synchronize(self._device)
        return (time.perf_counter() - begin) / count


def timed_save(engine: Any, folder: Path, tag: str) -> float:
    begin = time.perf_counter()
    engine.save_checkpoint(str(folder), tag)
    return time.perf_counter() - begin


def measure(setting: Setting, folder: Path) -> dict[str, Any]:
    device = step.accelerator_device()
    model = step.prepare_model(setting, device)
    batches = step.token_batches(setting, model.config.vocab_size, device)
    trainer: Any = make_trainer(model, setting, str(folder))
    engine, steps = trainer.engine, Steps(trainer, batches, setting, device)
    steps.run(setting.warmup)
    step.note(f"{setting.steps} steps without a save")
    alone_s = steps.run(setting.steps)

    engine.optimizer.async_save = False
    sync_s = timed_save(engine, folder, "sync")
    step.note(f"a synchronous save took {sync_s:.2f} s")
    shutil.rmtree(folder / "sync")
    steps.run(setting.warmup)

    engine.optimizer.async_save = True
    step.synchronize(device)
    begin = time.perf_counter()
    pause_s = timed_save(engine, folder, "async")
    saving = engine.optimizer.saving
    if saving is None:
        raise SystemExit("no copy of the states fits the host memory that is free, so the save was synchronous")
    during = []
    while saving.is_under_way():
        during.append(steps.run(1))
    write_s = time.perf_counter() - begin
    step.note(f"copied in {pause_s:.2f} s, written after {write_s:.1f} s, {len(during)} steps meanwhile")
    engine.optimizer.async_save = False
    after_s = steps.run(setting.steps)
    trainer.close()
    during_s = sum(during) / len(during) if during else None
    return {
        "parameters": sum(parameter.ds_numel for parameter in model.parameters()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "checkpoint_bytes": sum(path.stat().st_size for path in (folder / "async").iterdir()),
        "step_s_without": alone_s,
        "step_s_after": after_s,
        "step_s_during": during_s,
        "steps_during": len(during),
        "speed_during": None if during_s is None else (alone_s + after_s) / 2 / during_s,
        "sync_save_s": sync_s,
        "pause_s": pause_s,
        "async_save_s": write_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    settings.add_arguments(parser)
    parser.add_argument("--path", type=Path, required=True, help="where the checkpoints are written")
    arguments = parser.parse_args()
    setting = settings.from_arguments(arguments)
    folder = arguments.path / "async_save"
    folder.mkdir(parents=True)
    try:
        print(json.dumps(measure(setting, folder)), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
