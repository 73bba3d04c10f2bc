"""Measurements of what this machine can do: products, attention, copies, updates, disks."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch.nn import functional

from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.rule import Elements
from ds_slide.plan.ceilings import ATTENTION_WIDTH, CpuCeilings, DiskCeilings, GpuCeilings
from ds_slide.store.directories.run_files import RunFiles
from ds_slide.store.ssd.bandwidth import bandwidths

CPU = torch.device("cpu")
UPDATE_BYTES = 26
"""Bytes a parameter that AdamW in fp32 moves: gradient read; both parts of the split master and both moments read and
written."""
SHAPES = (
    (8192, 8192, 8192),
    (16384, 4864, 896),
    (16384, 2048, 2048),
    (16384, 11008, 2048),
    (16384, 2048, 11008),
    (8192, 18944, 3584),
)
"""Matrix products, rows x columns x inner: a square, and products in blocks of models of 0.5, 3 and 7 G parameters."""
CPU_SHAPE = (512, 512, 512)


@dataclass(frozen=True)
class _Amounts:
    """How much is measured, and for how long."""

    attention: tuple[tuple[int, int], ...] = ((8, 2048), (1, 32768))
    """Sequences and tokens of each."""
    heads: int = 16
    """Heads of `ATTENTION_WIDTH` elements, which blocks of models of 3 G parameters have."""
    copied_bytes: int = 512 << 20
    updated: int = 32 << 20
    """Elements of a unit, 0.5 GB."""
    units: int = 8
    """Units that are updated in turn, like in an engine. One unit alone nearly fits a cache of 480 MB, which some hosts
    have. Such a host did 226 GB/s with one unit and 145 under an engine, where others did 140 and 120 to 130
    (benchmarks/results/2026-11-25_nvidia-h100_held-out.md)."""
    rounds: int = 5
    warm_s: float = 0.3
    """Seconds of products on a GPU before the products that count: soon its power limits it to the rate that it can
    hold (backwards of blocks of 11.9 ms each took 12.8 from the fourth on,
    benchmarks/results/2026-11-23_nvidia-h200_timeline-slide.json)."""
    products_s: float = 0.5
    """Least seconds of the products that count: under that limit 20 ms of them do 569 to 764 TFLOP/s on an H100
    (benchmarks/results/2026-11-26_nvidia-h100_host-and-kernels.md)."""


AMOUNTS = _Amounts()


@dataclass
class _Rounds:
    """Rounds of a measurement. A `for` loop over them does the work, and each body of it is timed until `device` has
    done the work. The first round warms up. `AMOUNTS.rounds` more follow, or rounds until `least_s` have passed."""

    device: torch.device
    least_s: float | None
    times: list[float] = field(default_factory=list)

    def __iter__(self) -> Iterator[None]:
        self._synchronize()
        while len(self.times) <= AMOUNTS.rounds if self.least_s is None else sum(self.times) < self.least_s:
            begin = time.perf_counter()
            yield
            self._synchronize()
            self.times.append(time.perf_counter() - begin)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def seconds(self) -> float:
        """Seconds of one round: the median without the first round, or the mean where the rounds fill a time."""
        return statistics.median(self.times[1:]) if self.least_s is None else statistics.fmean(self.times)


def gpu_ceilings(device: torch.device) -> GpuCeilings:
    """Measure the ceilings of a CUDA device. Takes 2 GiB there and 1 GiB of page-locked memory."""
    link = Link(device)
    within = Copy(link.up.target, link.down.source, torch.cuda.current_stream(device))
    attention = {
        str(tokens): rates for count, tokens in AMOUNTS.attention if (rates := _attention_rates(count, tokens, device))
    }
    return GpuCeilings(
        name=torch.cuda.get_device_name(device),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory,
        product_tflop_s={"x".join(map(str, shape)): product_rate(shape, device) for shape in SHAPES},
        copy_gb_s=2 * copy_rate(within),
        h2d_gb_s=copy_rate(link.up),
        d2h_gb_s=copy_rate(link.down),
        both_ways_gb_s=copy_rate(link.up, link.down),
        attention_tflop_s={tokens: forward for tokens, (forward, _) in attention.items()},
        attention_backward_tflop_s={tokens: backward for tokens, (_, backward) in attention.items()},
    )


@dataclass(frozen=True)
class Copy:
    """`stream`: None for a copy within host memory."""

    target: torch.Tensor
    source: torch.Tensor
    stream: torch.cuda.Stream | None = None

    @property
    def device(self) -> torch.device:
        return self.target.device if self.target.is_cuda else self.source.device

    @classmethod
    def in_host_memory(cls) -> Copy:
        """Return a copy on torch's threads."""
        source = torch.ones(AMOUNTS.copied_bytes // 4, dtype=torch.uint8)
        return cls(torch.empty_like(source), source)


class Link:
    """Copies of page-locked memory to a CUDA device, `up`, and from it, `down`."""

    def __init__(self, device: torch.device) -> None:
        # Random contents: zeros run measurably faster through the matrix units.
        nbytes = AMOUNTS.copied_bytes
        host_out = torch.randint(256, (nbytes,), dtype=torch.uint8).pin_memory()
        host_in = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        device_in = torch.empty(nbytes, dtype=torch.uint8, device=device)
        device_out = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)
        self.up = Copy(device_in, host_out, torch.cuda.Stream(device))
        self.down = Copy(host_in, device_out, torch.cuda.Stream(device))


def copy_rate(*copies: Copy, least_s: float | None = None) -> float:
    """Measure the GB/s of each of the copies, all of them at once and of the same size. A copy within one memory reads
    and writes twice as much. `least_s`: seconds to measure for, instead of a number of rounds."""
    rounds = _Rounds(copies[0].device, least_s)
    for _ in rounds:
        for each in copies:
            with nullcontext() if each.stream is None else torch.cuda.stream(each.stream):
                each.target.copy_(each.source, non_blocking=True)
    return copies[0].source.nbytes / rounds.seconds / 1e9


def product_rate(shape: tuple[int, int, int], device: torch.device, least_s: float | None = None) -> float:
    """Measure the TFLOP/s of one product. The right matrix lies in memory like a linear layer's weight, [columns,
    inner]. Stored as [inner, columns] it is slower in some shapes: 16384x11008x2048 did 532 to 636 TFLOP/s then on
    H100s, and 670 like a linear layer (benchmarks/results/2026-11-26_nvidia-h100_host-and-kernels.md). On the
    processor `least_s` counts as in `copy_rate`."""
    rows, columns, inner = shape
    left = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    right = torch.randn(columns, inner, device=device, dtype=torch.bfloat16).t()
    product = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
    times = 10
    warm_up_and_count = [_Rounds(device, AMOUNTS.warm_s), _Rounds(device, AMOUNTS.products_s)]
    for rounds in warm_up_and_count if device.type == "cuda" else [_Rounds(device, least_s)]:
        for _ in rounds:
            for _ in range(times):
                torch.mm(left, right, out=product)
    return times * 2 * rows * columns * inner / rounds.seconds / 1e12


def _attention_rates(count: int, tokens: int, device: torch.device) -> tuple[float, float] | None:
    """Measure the TFLOP/s of the forward and the backward of causal attention in bf16; None where memory is short. A
    GPU without such kernels needs memory for a matrix of all tokens by all tokens."""
    try:
        return _timed_attention(count, tokens, device)
    except torch.OutOfMemoryError:
        return None


def _timed_attention(count: int, tokens: int, device: torch.device) -> tuple[float, float]:
    shape = (count, AMOUNTS.heads, tokens, ATTENTION_WIDTH)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    forward, backward = _Rounds(device, None), _Rounds(device, None)
    for _ in forward:
        functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    made = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    gradient = torch.randn_like(made)
    for _ in backward:
        torch.autograd.grad(made, (query, key, value), gradient, retain_graph=True)
    product = count * AMOUNTS.heads * tokens**2 * ATTENTION_WIDTH  # half of a matrix, two operations each
    return 2 * product / forward.seconds / 1e12, 5 * product / backward.seconds / 1e12


def cpu_ceilings(name: str, threads: int, cores: Sequence[int], *, with_products: bool) -> CpuCeilings:
    """Measure the ceilings of the processor. `threads`, `cores`: used by the updates. `with_products`: the processor is
    also the accelerator. Takes 4 GB, or a quarter of the free memory where that is less."""
    with updates(threads, cores) as measured:
        update_gb_s = measured.rate()
    return CpuCeilings(
        name=name,
        memory_bytes=psutil.virtual_memory().total,
        update_gb_s=update_gb_s,
        update_threads=threads,
        copy_gb_s=2 * copy_rate(Copy.in_host_memory()),
        product_tflop_s=product_rate(CPU_SHAPE, CPU) if with_products else None,
    )


@dataclass(frozen=True)
class MeasuredUpdates:
    """AdamW in fp32 on units that are updated in turn."""

    updater: CpuUpdater
    units: Iterator[Elements]

    def rate(self, least_s: float | None = None) -> float:
        """Measure the GB/s that are read and written. `least_s`: as of `copy_rate`."""
        hyper = AdamWHyper(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=10)
        rounds = _Rounds(CPU, least_s)
        for _ in rounds:
            self.updater.update_(next(self.units), hyper, grad_scale=0.5)
        return UPDATE_BYTES * AMOUNTS.updated / rounds.seconds / 1e9


@contextmanager
def updates(threads: int, cores: Sequence[int], ranks: int = 1) -> Iterator[MeasuredUpdates]:
    """Yield updates on the host memory of one of `ranks` ranks, which share the memory for units."""
    most = psutil.virtual_memory().available // 4 // (14 * AMOUNTS.updated)
    count = max(1, min(AMOUNTS.units, most) // ranks)
    updater = CpuUpdater(threads, cores)
    try:
        yield MeasuredUpdates(updater, itertools.cycle([_updated() for _ in range(count)]))
    finally:
        updater.end_threads()


def _updated() -> Elements:
    """Return a unit in host memory, with all pages touched."""
    weight, gradient = (torch.ones(AMOUNTS.updated, dtype=torch.bfloat16) for _ in range(2))
    remainder = torch.zeros(AMOUNTS.updated, dtype=torch.int16)
    return Elements(weight, remainder, [torch.full((AMOUNTS.updated,), 0.1) for _ in range(2)], gradient)


def disk_ceilings(directory: Path) -> DiskCeilings:
    """Measure the disk below `directory`, which exists, with a file that is deleted afterwards. Raises SlideError where
    no file can be made, OSError where the disk fails."""
    with tempfile.TemporaryDirectory(prefix="ds_slide-", dir=directory) as own:
        found = bandwidths(RunFiles(Path(own), json_path="--path"))
    return DiskCeilings(
        path=str(directory),
        read_gb_s=found.read / 1e9,
        write_gb_s=found.write / 1e9,
        mixed_gb_s=found.mixed / 1e9,
        direct=found.direct,
        backend=found.backend,
    )
