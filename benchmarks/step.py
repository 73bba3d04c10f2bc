"""Time training steps of one system in one setting and print the record as one JSON line.

    python3 benchmarks/step.py --system slide --model qwen2.5-3b --batch 8 --seq 2048 --clip 1.0 --out steps.jsonl

Weights and tokens depend on the seed only, so that records of different systems compare loss by loss. No launcher is
needed for the one process. Runs without a GPU too (`DS_ACCELERATOR=cpu`, `--model tiny`); GPU figures are then absent.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bases
import disk
import machine
import memory
import settings
import shapes
import torch
import trainers
from clock import PhaseClock
from settings import Setting
from torch import Tensor
from trainers import Batch, Sizes, Trainer, apply_patch, deepspeed_config, make_trainer, without_folder

_started = time.perf_counter()


def note(text: str) -> None:
    """Progress on stderr, with the seconds since the start: shows where a killed run was."""
    print(f"[{time.perf_counter() - _started:7.2f} s] {text}", file=sys.stderr, flush=True)


def accelerator_device() -> torch.device:
    """This rank's GPU, unless there is none or DS_ACCELERATOR=cpu asks for the processor."""
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")


def begin_rank(local_rank: int) -> torch.device:
    """Begin a rank that DeepSpeed's launcher has started, and return its device."""
    # The launcher's own limit and the end of another rank come as this signal.
    faulthandler.register(signal.SIGTERM, chain=True)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().set_device(local_rank)
    deepspeed.init_distributed()
    return torch.device(get_accelerator().current_device_name())


@contextlib.contextmanager
def folder_on_disk(setting: Setting) -> Iterator[str]:
    """Make an empty folder for the files of `--offload nvme`, and remove it at the end. Yields "" without that."""
    if setting.offload != "nvme":
        yield ""
        return
    folder = tempfile.mkdtemp(prefix="ds_slide-benchmark-", dir=setting.nvme_path)
    try:
        yield folder
    finally:
        # Stock leaves its files behind: 18 B a parameter.
        shutil.rmtree(folder, ignore_errors=True)


def warmed_up(setting: Setting, folder: str) -> tuple[Trainer, Callable[[int], None], StepLog]:
    """Return a trainer behind its warm-up, what runs a number of steps and waits for the device, and their log.

    `folder`: from `folder_on_disk`.
    """
    device = accelerator_device()
    use_gpu(setting, device)
    model = prepare_model(setting, device)
    batches = token_batches(setting, model.config.vocab_size, device)
    apply_patch(model, setting.patch)
    trainer, log, clock = start(model, setting, folder, device), StepLog(), PhaseClock(False)

    def run(count: int) -> None:
        run_steps(trainer, batches, setting, count, clock, log)
        synchronize(device)

    run(setting.warmup)
    return trainer, run, log


def build_model(setting: Setting, device: torch.device) -> Any:
    if setting.model in shapes.VISION_LANGUAGE:
        return shapes.build_vision_language(setting.model, device, setting.seed)
    if setting.build == "partitioned":
        sizes = Sizes.of(shapes.build_on_accelerator(setting.model, torch.device("meta"), setting.seed))
        return shapes.build_partitioned(setting.model, deepspeed_config(setting, sizes), setting.seed)
    build = shapes.build_in_host_memory if setting.build == "host" else shapes.build_on_accelerator
    return build(setting.model, device, setting.seed, setting.base)


def prepare_model(setting: Setting, device: torch.device) -> Any:
    """The model in training mode; the same weights for every system."""
    model: Any = build_model(setting, device)
    if setting.adapter:
        model = shapes.with_adapters(model, setting.adapter, setting.targets, setting.seed)
    if setting.checkpointing != "none":
        reentrant = setting.checkpointing == "reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model.train()


def token_batches(setting: Setting, vocabulary: int, device: torch.device) -> list[Tensor]:
    """Uniformly random token ids [batch, seq], the same on every machine and for every system."""
    generator = torch.Generator().manual_seed(setting.seed + 1)
    if setting.shortest:
        lengths = torch.randint(setting.shortest, setting.seq + 1, (setting.distinct_batches,), generator=generator)
        shapes_of_all = [(setting.batch, int(length)) for length in lengths]
        return [torch.randint(vocabulary, shape, generator=generator).to(device) for shape in shapes_of_all]
    shape = (setting.distinct_batches, setting.batch, setting.seq)
    return list(torch.randint(vocabulary, shape, generator=generator).to(device).unbind())


def use_gpu(setting: Setting, device: torch.device) -> None:
    """Compute on this GPU from now on, with the setting's share of its memory."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if setting.system != "stock":
            _limit_gpu(setting, device)


def start(model: Any, setting: Setting, folder: str, device: torch.device) -> Trainer:
    """Start the setting's system. Stock's share of the GPU holds from here on: a model that exists goes to the GPU
    whole, before it is divided."""
    trainer = make_trainer(model, setting, folder)
    if setting.system == "stock" and device.type == "cuda":
        _limit_gpu(setting, device)
    return trainer


def _limit_gpu(setting: Setting, device: torch.device) -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(setting.gpu_fraction, device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepLog:
    """What the steps leave behind: times, losses, norms and engine statistics."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.losses: list[Tensor] = []
        self.grad_norms: list[Any] = []
        self.engine: list[dict[str, Any]] = []


def run_steps(
    trainer: Trainer, batches: Sequence[Batch], setting: Setting, count: int, clock: PhaseClock, log: StepLog
) -> None:
    """`count` optimizer steps, appended to `log`.

    The time of a step is the time from the end of the one before to its own end, so work that an engine defers into the
    next step is counted: every timed step also pays for what its predecessor left.
    """
    before = time.perf_counter()
    for _ in range(count):
        position = len(log.step_s) * setting.grad_accum
        clock.start()
        losses = []
        for micro in range(setting.grad_accum):
            loss = trainer.forward(batches[(position + micro) % len(batches)])
            clock.end_of("forward")
            trainer.backward(loss)
            clock.end_of("backward")
            trainer.step()
            clock.end_of("step")
            losses.append(loss.detach())
        mean_loss = torch.stack(losses).mean()
        if setting.item:
            mean_loss.item()
        now = time.perf_counter()
        log.step_s.append(now - before)
        before = now
        log.losses.append(mean_loss)
        norm = trainer.grad_norm()
        # The engine may reuse the tensor, and reading it here would stop the GPU: keep a copy for later.
        log.grad_norms.append(norm.detach().clone() if isinstance(norm, Tensor) else norm)
        log.engine.append(trainer.stats())


def measure(setting: Setting, folder: str, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Build, warm up, time; the record as a flat dict, except for lists per step and the engine's own statistics.

    `folder`: an empty one for the files of `--offload nvme`; empty afterwards. `keep` gets the record as it is after
    the last step: closing a system with its states on disk, and measuring that disk again, can take half a minute.
    """
    device = accelerator_device()
    use_gpu(setting, device)
    pinned_in_rss = memory.pinned_counts_in_rss() if device.type == "cuda" else None
    note(f"building {setting.model} on {device}")
    model = prepare_model(setting, device)
    parameters = bases.elements(model)
    batches = token_batches(setting, model.config.vocab_size, device)
    synchronize(device)
    on_disk = setting.offload == "nvme"
    ceilings = [disk.ceiling(folder)] if on_disk else []
    baseline = memory.snapshot()

    note(f"{parameters / 1e9:.3f} G parameters; starting {setting.system}")
    begin = time.perf_counter()
    patched = apply_patch(model, setting.patch)
    trainer = start(model, setting, folder, device)
    synchronize(device)
    init_s = time.perf_counter() - begin
    initialised = memory.snapshot()
    peak_restarted = memory.restart_host_peak()
    memory.restart_gpu_peak()

    note(f"initialised in {init_s:.1f} s; {setting.warmup} steps to warm up")
    log, clock = StepLog(), PhaseClock(device.type == "cuda")
    run_steps(trainer, batches, setting, setting.warmup, clock, log)
    synchronize(device)
    note(f"{setting.steps} timed steps")
    traffic = disk.Traffic(folder) if on_disk else None
    begin = time.perf_counter()
    run_steps(trainer, batches, setting, setting.steps, clock, log)
    synchronize(device)
    total_s = time.perf_counter() - begin
    moved = traffic.since_start() if traffic else {}
    trained = memory.snapshot()
    note(f"{total_s / setting.steps:.3f} s a step")

    timed = slice(setting.warmup, None)
    record = {
        "parameters": parameters,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": machine.versions(),
        "init_s": init_s,
        **summarise_times(log.step_s[timed], clock.phases()[timed], total_s, setting.tokens_per_step),
        **summarise_memory(baseline, initialised, trained, parameters, pinned_in_rss),
        "host_peak_includes_init": not peak_restarted,
        "patched": patched,
        "losses": [float(loss) for loss in log.losses],
        "grad_norms": [None if norm is None else float(norm) for norm in log.grad_norms],
        **without_folder(summarise_engine(log.engine[timed]), folder, settings.HIDDEN_FOLDER),
        "history": history(log.engine),
        "deepspeed_config": without_folder(trainer.config, folder, settings.HIDDEN_FOLDER),
    }

    def with_disk() -> dict[str, Any]:
        if not on_disk:
            return record
        own = [step["ssd"] for step in log.engine[timed] if step and step["ssd"]]
        return record | disk.summarise(ceilings, moved, own, parameters, setting.steps, record["step_s"])

    keep(with_disk())
    if not on_disk:
        trainer.close()
        return record
    with disk.states_kept(folder) as states:
        trainer.close()
        disk.empty(folder)
        ceilings.append(disk.ceiling_of_states(states) if states else disk.ceiling(folder))
    return with_disk()


def summarise_times(step_s: list[float], phases: list[dict[str, float]], total_s: float, tokens: int) -> dict[str, Any]:
    median = statistics.median(step_s)
    summary: dict[str, Any] = {
        "step_s": median,
        "step_s_min": min(step_s),
        "step_s_max": max(step_s),
        "step_s_mean": total_s / len(step_s),
        "tokens_per_s": tokens / median,
    }
    for phase in ("forward", "backward", "step"):
        summary[f"{phase}_phase_s"] = statistics.median(step[phase] for step in phases)
    summary["step_s_all"] = step_s
    return summary


def summarise_memory(
    baseline: dict[str, int],
    initialised: dict[str, int],
    trained: dict[str, int],
    parameters: int,
    pinned_in_rss: bool | None,
) -> dict[str, Any]:
    """Peaks of set-up and training apart, and host bytes per parameter above the process before the engine existed."""

    def host(snapshot: dict[str, int], rss: str, pinned: str) -> int:
        return snapshot[rss] + (snapshot.get(pinned, 0) if pinned_in_rss is False else 0)

    resident = host(trained, "rss_bytes", "pinned_torch_bytes")
    peak = host(trained, "rss_peak_bytes", "pinned_torch_peak_bytes")
    before = host(baseline, "rss_bytes", "pinned_torch_bytes")
    return {
        "host_peak_bytes": peak,
        "host_peak_init_bytes": host(initialised, "rss_peak_bytes", "pinned_torch_peak_bytes"),
        "host_bytes": resident,
        "host_baseline_bytes": before,
        "host_bytes_per_parameter": resident / parameters,
        "host_peak_per_parameter": peak / parameters,
        "host_engine_bytes_per_parameter": (peak - before) / parameters,
        "machine_used_above_baseline_bytes": trained["machine_used_bytes"] - baseline["machine_used_bytes"],
        "pinned_in_rss": pinned_in_rss,
        "gpu_peak_allocated_bytes": trained.get("gpu_peak_allocated_bytes"),
        "gpu_peak_reserved_bytes": trained.get("gpu_peak_reserved_bytes"),
        "gpu_peak_init_bytes": initialised.get("gpu_peak_allocated_bytes"),
        "gpu_device_used_bytes": trained.get("gpu_device_used_bytes"),
        "memory": {"baseline": baseline, "initialised": initialised, "trained": trained},
    }


def summarise_engine(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The engine's own view: median bound and efficiency of the timed steps, everything of the last one."""
    reported = [step for step in steps if step]
    if not reported:
        return {}
    lanes = [step["bound_lane"] for step in reported]
    return {
        "bound_s": statistics.median(step["bound_s"] for step in reported),
        "bound_lane": max(set(lanes), key=lanes.count),
        "efficiency": statistics.median(step["efficiency"] for step in reported),
        "slide_stats": reported[-1],
    }


def history(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every step since the first, what shows how the engine came to what it has decided."""
    return [
        {
            "step_s": step["step_s"],
            "bound_s": step["bound_s"],
            "efficiency": step["efficiency"],
            "update_passes": step["update_passes"],
            "promoted_units": step["memory"]["promoted_units"],
            "keep": step["activations"]["keep"],
            "busy_s": {lane: totals["busy_s"] for lane, totals in step["lanes"].items()},
        }
        for step in steps
        if step
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    settings.add_arguments(parser)
    parser.add_argument("--out", type=Path, help="append the record to this file")
    parser.add_argument("--standby", action="store_true", help="import what runs need, and wait for a line on stdin")
    arguments = parser.parse_args()
    try:
        setting = settings.from_arguments(arguments)
    except ValueError as error:
        parser.error(str(error))
    if arguments.standby:
        trainers.import_libraries()
        if not sys.stdin.readline():
            return
    begin = {"setting": vars(setting.shown()), "command": setting.command()}
    out: Path | None = arguments.out
    before = out.stat().st_size if out and out.exists() else 0

    def write(record: dict[str, Any]) -> None:
        """The line of this run at the end of the file, instead of what an earlier call wrote there."""
        if out:
            with out.open("a") as file:
                file.truncate(before)
                file.write(json.dumps(begin | record) + "\n")

    record: dict[str, Any] = {}
    try:
        with folder_on_disk(setting) as folder:
            record = {"status": "ok"} | measure(setting, folder, lambda record: write({"status": "timed"} | record))
    except Exception as error:
        # The table must say why a system has no figures; the traceback goes to the log as usual.
        record = {
            "status": "failed",
            "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        }
        raise
    finally:
        write(record)
        if not out:
            print(json.dumps(begin | record))


if __name__ == "__main__":
    main()
