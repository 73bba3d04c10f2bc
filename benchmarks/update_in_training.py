"""What the CPU update loses to the copies that run beside it in training, and to a way back from it.

    python3 benchmarks/update_in_training.py [--blocks 6] [--numel 67108864] [--rounds 4] [--parts whole,...]

The AdamW update of several blocks in host memory one behind the other, as the engine does it (its memory, threads and
cores), while the GPU copies nothing, weights up, gradients down, or both: in one pass, in each of two, with an undo log
and out of place, in turns, round by round; and torch's fused AdamW on as many fp32 weights and gradients, without the
casts that it would need. Without a GPU nothing is copied.
The record is one JSON line: rates of the update in 1e9 parameters a second, the bytes that it moves a parameter, rates
of the copies meanwhile and of all bytes in host memory in GB/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from machine import cpu

from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import NOTHING_BESIDE, Beside, CpuUpdater
from ds_slide.optim.rule import Elements, Part
from ds_slide.runtime.updates.threads import update_cores
from ds_slide.store.host_memory import HostMemory
from ds_slide.store.way_back import SLICE, SLICE_BYTES

# A parameter; with a log the lowest byte of the weight and of both moments is written as well.
UPDATE_BYTES: dict[Part, int] = {"whole": 26, "weights": 18, "states": 18, "with_log": 29, "out_of_place": 26}
TORCH_BYTES = 28
COPY_BYTES = 256 << 20
HYPER = AdamWHyper(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=10)


@dataclass(frozen=True)
class Numbers:
    weight: torch.Tensor
    remainder: torch.Tensor
    states: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Block:
    own: Numbers
    spare: Numbers
    gradient: torch.Tensor
    low: tuple[torch.Tensor, ...]
    slices: torch.Tensor

    def beside(self, part: Part) -> Beside:
        """What an update writes for the way back."""
        if part == "with_log":
            return Beside(low=self.low, slices=self.slices)
        if part == "out_of_place":
            return Beside(self.spare.weight, self.spare.remainder, self.spare.states)
        return NOTHING_BESIDE


def make_numbers(memory: HostMemory, numel: int) -> Numbers:
    first, second = (memory.tensor(numel, torch.float32, transfers=False).fill_(0.1) for _ in range(2))
    weight = memory.tensor(numel, torch.bfloat16, transfers=True).fill_(0.5)
    return Numbers(weight, memory.tensor(numel, torch.int16, transfers=False).fill_(77), (first, second))


def make_block(memory: HostMemory, numel: int) -> Block:
    gradient = memory.tensor(numel, torch.bfloat16, transfers=True).fill_(0.25)
    low = tuple(memory.tensor(numel, torch.uint8, transfers=False).fill_(1) for _ in range(3))
    slices = memory.tensor(-(-numel // SLICE) * SLICE_BYTES, torch.uint8, transfers=False).fill_(1)
    return Block(make_numbers(memory, numel), make_numbers(memory, numel), gradient, low, slices)


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


def update(updater: CpuUpdater, block: Block, part: Part) -> Block:
    """-> the block as it is then."""
    own = block.own
    elements = Elements(own.weight, own.remainder, own.states, block.gradient)
    updater.update_(elements, HYPER, grad_scale=0.5, part=part, beside=block.beside(part))
    return replace(block, own=block.spare, spare=own) if part == "out_of_place" else block


def measure(
    updater: CpuUpdater, blocks: list[Block], rounds: int, parts: Sequence[Part], beside: list[Copies]
) -> dict[Part, dict[str, float]]:
    """Medians over the rounds; one round before them warms up."""
    numel = sum(block.gradient.numel() for block in blocks)
    rates: dict[Part, list[float]] = {part: [] for part in parts}
    copied: dict[Part, list[float]] = {part: [] for part in parts}
    for _ in range(rounds + 1):
        for part in parts:
            with all_running(beside):
                begin = time.perf_counter()
                blocks = [update(updater, block, part) for block in blocks]
                elapsed = time.perf_counter() - begin
                moved = sum(each.done_bytes for each in beside)
            rates[part].append(numel / elapsed)
            copied[part].append(moved / elapsed)
    return {part: figures(UPDATE_BYTES[part], rates[part][1:], copied[part][1:]) for part in parts}


def measure_torch(numel: int, rounds: int) -> dict[str, float]:
    weight = torch.nn.Parameter(torch.randn(numel))
    weight.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([weight], HYPER.lr, HYPER.betas, HYPER.eps, HYPER.weight_decay, fused=True)
    rates = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        optimizer.step()
        rates.append(numel / (time.perf_counter() - begin))
    return figures(TORCH_BYTES, rates[1:], [0.0])


def figures(nbytes: int, rates: list[float], copied: list[float]) -> dict[str, float]:
    rate, copy_rate = statistics.median(rates), statistics.median(copied)
    return {
        "gparam_s": round(rate / 1e9, 3),
        "bytes_per_param": nbytes,
        "copies_gb_s": round(copy_rate / 1e9, 1),
        "memory_gb_s": round((rate * nbytes + copy_rate) / 1e9, 1),
    }


def parts_of(text: str) -> list[Part]:
    found = [part for part in UPDATE_BYTES if part in text.split(",")]
    if len(found) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"parts are {', '.join(UPDATE_BYTES)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--numel", type=int, default=64 << 20, help="parameters of a block")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", default="auto", type=lambda text: text if text == "auto" else int(text))
    parser.add_argument("--parts", default=",".join(UPDATE_BYTES), type=parts_of, help="of these, a comma between two")
    arguments = parser.parse_args()

    threads, cores = update_cores(arguments.threads, "auto", 0, 1)
    has_gpu = torch.cuda.is_available()
    updater, memory = CpuUpdater(threads, cores), HostMemory(page_lock=has_gpu, huge_pages=True)
    blocks = [make_block(memory, arguments.numel) for _ in range(arguments.blocks)]
    besides: dict[str, list[Copies]] = {"nothing": []}
    record: dict[str, object] = {"cpu": cpu(), "threads": threads}
    if has_gpu:
        up, down = Copies(memory, up=True), Copies(memory, up=False)
        besides |= {"up": [up], "down": [down], "both": [up, down]}
        record["gpu"] = torch.cuda.get_device_name()
    for name, beside in besides.items():
        for part, found in measure(updater, blocks, arguments.rounds, arguments.parts, beside).items():
            record[f"{part} beside {name}"] = found
    torch.set_num_threads(threads)
    record["torch beside nothing"] = measure_torch(arguments.blocks * arguments.numel, arguments.rounds)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
