"""What checksums of states on SSD cost: training steps with them on and off in turns, in one process.

    python3 benchmarks/checksums.py --system slide --model qwen2.5-1.5b --batch 8 --seq 2048 --clip 1.0 \\
        --offload nvme --nvme-path DIR --slide '{"gpu_states": 0, "host_memory": 0}' --warmup 2 --seconds 110

The options are those of step.py, without `--steps`: steps go on for `--seconds`, in the order off, on, on, off and so
on, so that a disk that becomes slower or faster does so for both. The record is one JSON line. `cost` is the median of
on over off less one, of neighbouring steps; beside it `cost_s` of one thread that asks for sums, if nothing hid them.
A chunk that is read ahead for the step after a change belongs to the step before; all other work lies within its step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from typing import Any

import settings
import step
import torch
from clock import PhaseClock
from settings import Setting
from trainers import make_trainer

from ds_slide import _native
from ds_slide.store.ssd.page_sums import PageSums

RATE_BYTES = {"cache_gb_s": 256 << 10, "memory_gb_s": 256 << 20}


def rate_of_one_thread(nbytes: int) -> float:
    """GB/s of CRC32C over as many random bytes again and again."""
    data = torch.frombuffer(_native.Slab(nbytes, False, True), dtype=torch.uint8)
    data.view(torch.int64).random_()
    sums = torch.empty(nbytes // 4096, dtype=torch.int32)
    workers = _native.Workers(1, [])
    repeats = max(4, (256 << 20) // nbytes)
    # Pieces of 64 pages, which the calling thread takes itself.
    pieces = [(data.data_ptr() + at, sums.data_ptr() + at // 1024) for at in range(0, nbytes, 256 << 10)]
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(repeats):
            for address, place in pieces:
                _native.page_sums(workers, address, 256 << 10, place)
        best = min(best, (time.perf_counter() - begin) / repeats)
    return nbytes / best / 1e9


def measure(setting: Setting, folder: str, seconds: float) -> dict[str, Any]:
    device = step.accelerator_device()
    rates = {name: rate_of_one_thread(nbytes) for name, nbytes in RATE_BYTES.items()}
    step.note(f"building {setting.model} on {device}; CRC32C of one thread: {rates}")
    model = step.prepare_model(setting, device)
    batches = step.token_batches(setting, model.config.vocab_size, device)
    trainer: Any = make_trainer(model, setting, folder)
    sums: PageSums | None = trainer.engine.optimizer.runtime.parts.ssd.store._sums
    if sums is None:
        raise SystemExit("checksums are off; take them out of --slide")
    clock, log = PhaseClock(device.type == "cuda"), step.StepLog()
    step.note(f"{setting.warmup} steps to warm up")
    step.run_steps(trainer, batches, setting, setting.warmup, clock, log)
    step.synchronize(device)
    step.note(f"steps for {seconds:g} s, off and on in turns")
    begin, timed = time.perf_counter(), {False: [], True: []}
    lines: list[dict[str, Any]] = []
    for turn in itertools.cycle((False, True, True, False)):
        whole = len(timed[False]) == len(timed[True])
        if whole and timed[True] and time.perf_counter() - begin > seconds:
            break
        sums.is_on = turn
        step.run_steps(trainer, batches, setting, 1, clock, log)
        timed[turn].append(log.step_s[-1])
        if turn:
            lines.append(log.engine[-1])
    stats = lines[-1]
    record = {
        "parameters": stats["memory"]["parameters"],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        **rates,
        "off_s": statistics.median(timed[False]),
        "on_s": statistics.median(timed[True]),
        "cost": statistics.median(on / off for off, on in zip(timed[False], timed[True], strict=True)) - 1,
        "cost_s": (cost_s := statistics.median(line["ssd"]["checked_s"] for line in lines)),
        "cost_if_nothing_hid_it": cost_s / statistics.median(timed[False]),
        "checked_bytes": statistics.median(line["ssd"]["checked_bytes"] for line in lines),
        "moved_bytes": statistics.median(line["ssd"]["read_bytes"] + line["ssd"]["written_bytes"] for line in lines),
        "sums_bytes": stats["ssd"]["nbytes"] // 4096 * 4,
        "bound_lane": stats["bound_lane"],
        "step_s_off": timed[False],
        "step_s_on": timed[True],
        "losses": [float(loss) for loss in log.losses],
    }
    trainer.close()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    settings.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no further pair of steps begins")
    arguments = parser.parse_args()
    setting = settings.from_arguments(arguments)
    if setting.system != "slide" or setting.offload != "nvme":
        parser.error("checksums are of --system slide with --offload nvme")
    folder = tempfile.mkdtemp(prefix="ds_slide-benchmark-", dir=setting.nvme_path)
    try:
        print(json.dumps(measure(setting, folder, arguments.seconds)), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
