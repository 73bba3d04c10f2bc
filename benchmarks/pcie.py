"""Ceilings of this machine: page-locked copies to and from the GPU, alone and together, a device copy, a bf16 GEMM.

    python3 benchmarks/pcie.py [--out FILE]

Prints one JSON line (GB/s and TFLOP/s). Machines of one kind differ, so every results page carries its own ceilings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

COPY_BYTES = 1 << 30
COPIES = 4
ROUNDS = 5
GEMM_SIZE = 8192
GEMMS = 20


def median_seconds(work: Callable[[], None]) -> float:
    """Median wall time of `work` between two synchronizes, after one round to warm up."""
    times = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure() -> dict[str, float | str | None]:
    """The record; figures are None without a GPU."""
    names = ("h2d_gb_s", "d2h_gb_s", "h2d_both_gb_s", "d2h_both_gb_s", "device_copy_gb_s", "gemm_tflop_s")
    if not torch.cuda.is_available():
        return {"device": "cpu", **dict.fromkeys(names)}
    # Random contents: zeros run measurably faster through the matrix units.
    host_out = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8).pin_memory()
    host_in = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device_in = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    device_out = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    up, down = torch.cuda.Stream(), torch.cuda.Stream()

    def h2d() -> None:
        with torch.cuda.stream(up):
            for _ in range(COPIES):
                device_in.copy_(host_out, non_blocking=True)

    def d2h() -> None:
        with torch.cuda.stream(down):
            for _ in range(COPIES):
                host_in.copy_(device_out, non_blocking=True)

    def both() -> None:
        h2d()
        d2h()

    def device_copy() -> None:
        for _ in range(COPIES):
            device_in.copy_(device_out)

    left = torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(left)

    def gemm() -> None:
        for _ in range(GEMMS):
            torch.mm(left, right, out=product)

    gigabytes = COPIES * COPY_BYTES / 1e9
    together = gigabytes / median_seconds(both)
    return {
        "device": torch.cuda.get_device_name(),
        "h2d_gb_s": gigabytes / median_seconds(h2d),
        "d2h_gb_s": gigabytes / median_seconds(d2h),
        # Both directions carry the same bytes and are counted until the later one has finished.
        "h2d_both_gb_s": together,
        "d2h_both_gb_s": together,
        "device_copy_gb_s": 2 * gigabytes / median_seconds(device_copy),
        "gemm_tflop_s": GEMMS * 2 * GEMM_SIZE**3 / median_seconds(gemm) / 1e12,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append the record to this file")
    arguments = parser.parse_args()
    line = json.dumps(measure())
    if arguments.out:
        with arguments.out.open("a") as file:
            file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
