"""What the CPU update loses to the copies that run beside it in training.

    python3 benchmarks/update_in_training.py [--blocks 6] [--numel 67108864] [--rounds 4] [--threads auto]

The AdamW update of several blocks in host memory one behind the other, as the engine does it (its memory, threads and
cores), in one pass and in each of two, while the GPU copies nothing, weights up, gradients down, or both (nothing where
there is no GPU); and torch's fused AdamW on as many fp32 weights and gradients, the casts that it would need left out.
The record is one JSON line: rates of the update in 1e9 parameters a second, of the copies meanwhile and of all bytes in
host memory in GB/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from machine import cpu

from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.rule import Part
from ds_slide.runtime.updates.threads import update_cores
from ds_slide.store.host_memory import HostMemory

UPDATE_BYTES: dict[Part, int] = {"whole": 26, "weights": 18, "states": 18}
TORCH_BYTES = 28
COPY_BYTES = 256 << 20
HYPER = AdamWHyper(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=10)


@dataclass(frozen=True)
class Block:
    weight: torch.Tensor
    remainder: torch.Tensor
    states: tuple[torch.Tensor, torch.Tensor]
    gradient: torch.Tensor


def make_block(memory: HostMemory, numel: int) -> Block:
    states = tuple(memory.tensor(numel, torch.float32, transfers=False).fill_(0.1) for _ in range(2))
    return Block(
        memory.tensor(numel, torch.bfloat16, transfers=True).fill_(0.5),
        memory.tensor(numel, torch.int16, transfers=False).fill_(77),
        (states[0], states[1]),
        memory.tensor(numel, torch.bfloat16, transfers=True).fill_(0.25),
    )


class Copies:
    """One direction between page-locked memory and the GPU, again and again on a stream of its own."""

    def __init__(self, memory: HostMemory, *, up: bool) -> None:
        self._host = memory.tensor(COPY_BYTES, torch.uint8, transfers=True)
        self._device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        self._up = up
        self.done_bytes = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        stopped, stream = threading.Event(), torch.cuda.Stream()
        self.done_bytes = 0

        def run() -> None:
            while not stopped.is_set():
                with torch.cuda.stream(stream):
                    target, source = (self._device, self._host) if self._up else (self._host, self._device)
                    target.copy_(source, non_blocking=True)
                stream.synchronize()
                self.done_bytes += COPY_BYTES

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()


@contextmanager
def all_running(copies: list[Copies]) -> Iterator[None]:
    if not copies:
        yield
        return
    with copies[0].running(), all_running(copies[1:]):
        yield


def measure(work: Callable[[], None], numel: int, nbytes: int, rounds: int, beside: list[Copies]) -> dict[str, float]:
    """Medians over the rounds; one round before them warms up. `work`: an update of `numel` parameters, which moves
    `nbytes` for each."""
    rates, copied = [], []
    for _ in range(rounds + 1):
        with all_running(beside):
            begin = time.perf_counter()
            work()
            elapsed = time.perf_counter() - begin
            moved = sum(each.done_bytes for each in beside)
        rates.append(numel / elapsed)
        copied.append(moved / elapsed)
    rate, copy_rate = statistics.median(rates[1:]), statistics.median(copied[1:])
    return {
        "gparam_s": round(rate / 1e9, 3),
        "copies_gb_s": round(copy_rate / 1e9, 1),
        "memory_gb_s": round((rate * nbytes + copy_rate) / 1e9, 1),
    }


def update(updater: CpuUpdater, blocks: list[Block], part: Part) -> None:
    for block in blocks:
        updater.update_(block.weight, block.remainder, block.states, block.gradient, HYPER, grad_scale=0.5, part=part)


def torch_fused(numel: int) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(
        [torch.nn.Parameter(torch.randn(numel))], HYPER.lr, HYPER.betas, HYPER.eps, HYPER.weight_decay, fused=True
    )
    optimizer.param_groups[0]["params"][0].grad = torch.randn(numel)
    return optimizer.step  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--numel", type=int, default=64 << 20, help="parameters of a block")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", default="auto", type=lambda text: text if text == "auto" else int(text))
    arguments = parser.parse_args()

    threads, cores = update_cores(arguments.threads, "auto", 0, 1)
    on_gpu = torch.cuda.is_available()
    updater, memory = CpuUpdater(threads, cores), HostMemory(page_lock=on_gpu, huge_pages=True)
    blocks = [make_block(memory, arguments.numel) for _ in range(arguments.blocks)]
    besides: dict[str, list[Copies]] = {"nothing": []}
    if on_gpu:
        up, down = Copies(memory, up=True), Copies(memory, up=False)
        besides |= {"up": [up], "down": [down], "both": [up, down]}
    gpu = torch.cuda.get_device_name() if on_gpu else "none"
    record: dict[str, object] = {"cpu": cpu(), "gpu": gpu, "threads": threads}
    numel, rounds = arguments.numel * arguments.blocks, arguments.rounds
    for part, nbytes in UPDATE_BYTES.items():
        for name, beside in besides.items():
            work = partial(update, updater, blocks, part)
            record[f"{part} beside {name}"] = measure(work, numel, nbytes, rounds, beside)
    torch.set_num_threads(threads)
    record["torch beside nothing"] = measure(torch_fused(numel), numel, TORCH_BYTES, rounds, [])
    print(json.dumps(record))


if __name__ == "__main__":
    main()
