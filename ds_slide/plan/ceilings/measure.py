"""Measures the ceilings of this machine, within seconds."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from torch.nn import functional

from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.plan.ceilings.figures import ATTENTION_WIDTH, CpuCeilings, DiskCeilings, GpuCeilings
from ds_slide.store.directories.run_files import RunFiles
from ds_slide.store.ssd.bandwidth import bandwidths

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
_ATTENTION = ((8, 2048), (1, 32768))
_HEADS = 16
"""Attention is measured with these sequences and tokens, and with this number of heads of `ATTENTION_WIDTH`, which
blocks of models of 3 G parameters have."""
_COPY_BYTES = 512 << 20
_CPU_SHAPE = (512, 512, 512)
_UPDATED, _MOST_UNITS = 32 << 20, 8
"""Elements of a unit, 0.5 GB, and the number of units that are updated in turn, like in an engine. One unit alone
nearly fits a cache of 480 MB, which some hosts have. Such a host did 226 GB/s with one unit and 145 under an engine,
where others did 140 and 120 to 130 (benchmarks/results/2026-11-25_nvidia-h100_held-out.md)."""
_ROUNDS = 5
_WARM_S = 0.3
"""Seconds of products on a GPU before the products that count: soon its power limits it to the rate that it can hold
(backwards of blocks of 11.9 ms each took 12.8 from the fourth on,
benchmarks/results/2026-11-23_nvidia-h200_timeline-slide.json)."""
_PRODUCTS_S = 0.5
"""Least seconds of the products that count: under that limit 20 ms of them do 569 to 764 TFLOP/s on an H100
(benchmarks/results/2026-11-26_nvidia-h100_host-and-kernels.md)."""


def gpu_ceilings(device: torch.device) -> GpuCeilings:
    """Measure the ceilings of a CUDA device. Takes 2 GiB there and 1 GiB of page-locked memory."""
    # Random contents: zeros run measurably faster through the matrix units.
    host_out = torch.randint(256, (_COPY_BYTES,), dtype=torch.uint8).pin_memory()
    host_in = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device_in = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    device_out = torch.randint(256, (_COPY_BYTES,), dtype=torch.uint8, device=device)
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def h2d() -> None:
        with torch.cuda.stream(up):
            device_in.copy_(host_out, non_blocking=True)

    def d2h() -> None:
        with torch.cuda.stream(down):
            host_in.copy_(device_out, non_blocking=True)

    def both() -> None:
        h2d()
        d2h()

    def rate(work: Callable[[], object], nbytes: int = _COPY_BYTES) -> float:
        return nbytes / _on_gpu(work, device) / 1e9

    attention = {
        str(tokens): rates for count, tokens in _ATTENTION if (rates := _attention_rates(count, tokens, device))
    }
    return GpuCeilings(
        name=torch.cuda.get_device_name(device),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory,
        product_tflop_s={"x".join(map(str, shape)): _product_rate(shape, device) for shape in SHAPES},
        copy_gb_s=rate(lambda: device_in.copy_(device_out), 2 * _COPY_BYTES),
        h2d_gb_s=rate(h2d),
        d2h_gb_s=rate(d2h),
        both_ways_gb_s=rate(both),
        attention_tflop_s={tokens: forward for tokens, (forward, _) in attention.items()},
        attention_backward_tflop_s={tokens: backward for tokens, (_, backward) in attention.items()},
    )


def _product_rate(shape: tuple[int, int, int], device: torch.device) -> float:
    """Measure the TFLOP/s of one product. The right matrix lies in memory like a linear layer's weight, [columns,
    inner]. Stored as [inner, columns] it is slower in some shapes: 16384x11008x2048 did 532 to 636 TFLOP/s then on
    H100s, and 670 like a linear layer (benchmarks/results/2026-11-26_nvidia-h100_host-and-kernels.md)."""
    rows, columns, inner = shape
    left = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    right = torch.randn(columns, inner, device=device, dtype=torch.bfloat16).t()
    product = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
    times = 10

    def multiply() -> None:
        for _ in range(times):
            torch.mm(left, right, out=product)

    if device.type == "cuda":
        _repeat(multiply, _WARM_S)
        seconds = _repeat(multiply, _PRODUCTS_S)
    else:
        seconds = _median(multiply)
    return times * 2 * rows * columns * inner / seconds / 1e12


def _repeat(work: Callable[[], object], least_s: float) -> float:
    """Run `work` on a GPU until `least_s` has passed, and return the mean seconds of one run."""
    begin = now = time.perf_counter()
    rounds = 0
    while now < begin + least_s:
        work()
        torch.cuda.synchronize()
        now, rounds = time.perf_counter(), rounds + 1
    return (now - begin) / rounds


def _attention_rates(count: int, tokens: int, device: torch.device) -> tuple[float, float] | None:
    """Measure the TFLOP/s of the forward and the backward of causal attention in bf16; None where memory is short. A
    GPU without such kernels needs memory for a matrix of all tokens by all tokens."""
    try:
        return _timed_attention(count, tokens, device)
    except torch.OutOfMemoryError:
        return None


def _timed_attention(count: int, tokens: int, device: torch.device) -> tuple[float, float]:
    shape = (count, _HEADS, tokens, ATTENTION_WIDTH)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def attention() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    made = attention()
    gradient = torch.randn_like(made)
    forward = _on_gpu(attention, device)
    backward = _on_gpu(lambda: torch.autograd.grad(made, (query, key, value), gradient, retain_graph=True), device)
    product = count * _HEADS * tokens**2 * ATTENTION_WIDTH  # half of a matrix, two operations each
    return 2 * product / forward / 1e12, 5 * product / backward / 1e12


def cpu_ceilings(name: str, threads: int, cores: Sequence[int], *, with_products: bool) -> CpuCeilings:
    """Measure the ceilings of the processor. `threads`, `cores`: used by the updates. `with_products`: the processor is
    also the accelerator. Takes 4 GB, or a quarter of the free memory where that is less."""
    device = torch.device("cpu")
    return CpuCeilings(
        name=name,
        memory_bytes=psutil.virtual_memory().total,
        update_gb_s=_update_rate(threads, cores),
        update_threads=threads,
        copy_gb_s=_host_copy_rate(),
        product_tflop_s=_product_rate(_CPU_SHAPE, device) if with_products else None,
    )


def _updated() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Return weight, remainder, moments and gradient of a unit in host memory, with all pages touched."""
    weight, gradient = (torch.ones(_UPDATED, dtype=torch.bfloat16) for _ in range(2))
    remainder = torch.zeros(_UPDATED, dtype=torch.int16)
    return weight, remainder, [torch.full((_UPDATED,), 0.1) for _ in range(2)], gradient


def _update_rate(threads: int, cores: Sequence[int]) -> float:
    """Measure the GB/s of AdamW in fp32."""
    updater = CpuUpdater(threads, cores)
    one = _updated()
    most = psutil.virtual_memory().available // 4 // sum(each.nbytes for each in (*one[:2], *one[2], one[3]))
    units = itertools.cycle([one, *(_updated() for _ in range(min(_MOST_UNITS, most) - 1))])
    hyper = AdamWHyper(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=10)

    def update() -> None:
        updater.update_(*next(units), hyper, grad_scale=0.5)

    try:
        seconds = _median(update)
    finally:
        updater.end_threads()
    return UPDATE_BYTES * _UPDATED / seconds / 1e9


def _host_copy_rate() -> float:
    """Measure the GB/s that a copy on torch's threads reads and writes."""
    source = torch.ones(_COPY_BYTES // 4, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / _median(lambda: target.copy_(source)) / 1e9


def disk_ceilings(directory: Path) -> DiskCeilings:
    """Measure the disk below `directory`, which exists, with a file that is deleted afterwards. Raises SlideError where
    no file can be made, OSError where the disk fails."""
    with tempfile.TemporaryDirectory(prefix="ds_slide-", dir=directory) as own:
        found = bandwidths(RunFiles(Path(own), json_path="--path"), "auto")
    return DiskCeilings(
        path=str(directory),
        read_gb_s=found.read / 1e9,
        write_gb_s=found.write / 1e9,
        mixed_gb_s=found.mixed / 1e9,
        direct=found.direct,
        backend=found.backend,
    )


def _median(work: Callable[[], object]) -> float:
    """Return the median seconds of `work`, after a round to warm up."""
    times = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _on_gpu(work: Callable[[], object], device: torch.device) -> float:
    def waited() -> None:
        work()
        torch.cuda.synchronize(device)

    torch.cuda.synchronize(device)
    return _median(waited)
