"""CPU AdamW: the split update of DS-Slide beside torch._fused_adamw_ (fp32 weights and gradients), in one run.

    python3 benchmarks/adamw.py [--threads 1,2,4,8,16] [--numel 64Mi] [--pin] [--csv FILE]

Bytes a parameter: ours 26 (bf16 gradient; both parts of the split master and both moments read and written; the bf16
weight that the GPU needs is one of the state buffers), torch 28, not counting the two casts it would need as well
(gradient to fp32, weight to bf16). The two take turns, round by round, so that a busy neighbour hits both.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import cpu

from ds_slide import _native
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater

OUR_BYTES = 26
TORCH_BYTES = 28
HYPER = AdamWHyper(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=10)


@dataclass(frozen=True)
class Row:
    """Medians over the rounds; rates in 1e9 parameters (or bytes) a second."""

    threads: int
    numel: int
    isa: str
    ours_gparam_s: float
    ours_gb_s: float
    torch_gparam_s: float
    torch_gb_s: float
    ratio: float
    ratio_of_best: float


def slab(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in the kind of memory that the engine uses."""
    return torch.frombuffer(_native.Slab(numel * dtype.itemsize, False, False), dtype=dtype)


def ours(numel: int, threads: int, cores: list[int]) -> Callable[[], None]:
    updater = CpuUpdater(threads, cores)
    weight, grad = slab(numel, torch.bfloat16).normal_(), slab(numel, torch.bfloat16).normal_()
    remainder = slab(numel, torch.int16).random_(-(1 << 15), 1 << 15)
    exp_avg, exp_avg_sq = slab(numel, torch.float32).fill_(0.1), slab(numel, torch.float32).fill_(0.1)
    return lambda: updater.update_(weight, remainder, (exp_avg, exp_avg_sq), grad, HYPER, grad_scale=0.5)


def fused(numel: int) -> Callable[[], None]:
    weight, grad = torch.randn(numel), torch.randn(numel)
    exp_avg, exp_avg_sq = torch.full((numel,), 0.1), torch.full((numel,), 0.1)
    step = torch.tensor(float(HYPER.step))
    return lambda: torch._fused_adamw_(
        [weight],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        lr=HYPER.lr,
        beta1=HYPER.betas[0],
        beta2=HYPER.betas[1],
        weight_decay=HYPER.weight_decay,
        eps=HYPER.eps,
        amsgrad=False,
        maximize=False,
    )


def seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(threads: int, numel: int, rounds: int, cores: list[int]) -> Row:
    torch.set_num_threads(threads)
    our_step, torch_step = ours(numel, threads, cores), fused(numel)
    for _ in range(2):
        our_step()
        torch_step()
    pairs = [(seconds(our_step), seconds(torch_step)) for _ in range(rounds)]
    our_times, torch_times = zip(*pairs, strict=True)
    our_rate, torch_rate = (numel / statistics.median(times) / 1e9 for times in (our_times, torch_times))
    return Row(
        threads=threads,
        numel=numel,
        isa=_native.isa(),
        ours_gparam_s=round(our_rate, 3),
        ours_gb_s=round(our_rate * OUR_BYTES, 1),
        torch_gparam_s=round(torch_rate, 3),
        torch_gb_s=round(torch_rate * TORCH_BYTES, 1),
        ratio=round(our_rate / torch_rate, 3),
        ratio_of_best=round(min(torch_times) / min(our_times), 3),
    )


def parse_numel(text: str) -> int:
    factors = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    return int(text[:-2]) * factors[text[-2:]] if text[-2:] in factors else int(text)


def append_csv(path: Path, rows: list[Row]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, ["cpu", "torch", *asdict(rows[0])])
        if is_new:
            writer.writeheader()
        for row in rows:
            writer.writerow({"cpu": cpu(), "torch": torch.__version__, **asdict(row)})


def main() -> None:
    available = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [count for count in (1, 2, 4, 8, 16, 32) if count <= len(available)]
    parser.add_argument("--threads", help="comma-separated thread counts", default=",".join(map(str, default)))
    parser.add_argument("--numel", help="parameters, for instance 64Mi", type=parse_numel, default="64Mi")
    parser.add_argument("--rounds", help="timed rounds of each", type=int, default=20)
    parser.add_argument("--pin", help="pin our threads to cores", action="store_true")
    parser.add_argument("--csv", help="append the rows to this file", type=Path)
    arguments = parser.parse_args()

    print(f"{cpu()}; {_native.isa()}; torch {torch.__version__}; {arguments.numel} parameters")
    print(f"{'threads':>7} | {'ours G param/s':>14} {'GB/s':>6} | {'torch G param/s':>15} {'GB/s':>6} | ratio (best)")
    rows = []
    for threads in map(int, arguments.threads.split(",")):
        row = measure(threads, arguments.numel, arguments.rounds, available if arguments.pin else [])
        print(
            f"{row.threads:7} | {row.ours_gparam_s:14.2f} {row.ours_gb_s:6.1f} | {row.torch_gparam_s:15.2f} "
            f"{row.torch_gb_s:6.1f} | {row.ratio:5.2f} ({row.ratio_of_best:.2f})",
            flush=True,
        )
        rows.append(row)
    if arguments.csv:
        append_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
