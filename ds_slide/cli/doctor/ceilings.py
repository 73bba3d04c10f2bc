"""The ceilings of this machine: measured within seconds, and kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import cpuinfo
import psutil
import torch
from torch.nn import functional

from ds_slide.cli.doctor.process import measure_process
from ds_slide.errors import SlideError
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.rule import Elements
from ds_slide.plan.ceilings import ATTENTION_WIDTH, Ceilings, CpuCeilings, DiskCeilings, GpuCeilings, checked
from ds_slide.plan.cores import Share
from ds_slide.report.tested import installed_version
from ds_slide.runtime.updates.threads import update_cores
from ds_slide.store.directories.run_files import RunFiles
from ds_slide.store.ssd.bandwidth import bandwidths


def folder() -> Path:
    """Return the folder of the kept measurements."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "ds_slide" / "ceilings"


def cpu_name() -> str:
    return str(cpuinfo.get_cpu_info().get("brand_raw") or platform.processor() or platform.machine())


def gpu_computes() -> bool:
    """Whether a GPU computes, by the rule of DeepSpeed's accelerator."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def machine_key() -> dict[str, Any]:
    """Return what a measurement depends on, without the disks."""
    return {
        # A change of what is measured, or of how, takes another number: older figures are then not used.
        "measured_as": 2,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if gpu_computes()
        else [],
        "torch": torch.__version__,
        # These libraries take most of a process's memory before an engine is built.
        "transformers": installed_version("transformers"),
        "deepspeed": installed_version("deepspeed"),
        "kernel": platform.release(),
    }


def of_this_machine(paths: Sequence[Path] = (), *, refresh: bool = False, again: bool = False) -> tuple[Ceilings, str]:
    """Return the ceilings, and the reason why a process cannot be measured, "" for none. Kept measurements are used
    where the machine is the same. They have the disks below `paths`, or without paths all disks that were measured
    before. `again`: a failed measurement of a process is tried again. Raises SlideError where a path cannot be
    measured."""
    key = machine_key()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = folder() / f"{digest}.json"
    kept = None if refresh else _kept(file, key)
    disks = {disk.path: disk for disk in (kept.disks if kept else ())}
    wanted = [str(path.resolve()) for path in paths]
    missing = [path for path in wanted if path not in disks]
    needs_process = kept is None or (again and kept.process_bytes is None)
    if kept is not None and not missing and not needs_process:
        return _with_disks(kept, disks, wanted), ""
    disks.update({path: _disk(Path(path)) for path in missing})
    if kept is None:
        threads, cores = update_cores("auto", "auto", Share.whole().cores)
        on_gpu = gpu_computes()
        kept = Ceilings(
            source=f"measured on {platform.node()}, {date.today().isoformat()}",
            cpu=_cpu_ceilings(str(key["cpu"]), threads, cores, with_products=not on_gpu),
            gpu=_gpu_ceilings(torch.device("cuda", 0)) if on_gpu else None,
        )
    failed = ""
    if needs_process:
        try:
            kept = kept.model_copy(update={"process_bytes": measure_process(on_gpu=gpu_computes())})
        except SlideError as error:
            failed = str(error)
    kept = _with_disks(kept, disks, list(disks))
    _keep(file, key, kept)
    return _with_disks(kept, disks, wanted), failed


def _with_disks(ceilings: Ceilings, disks: Mapping[str, DiskCeilings], paths: Sequence[str]) -> Ceilings:
    """Return a copy with the disks below `paths`; without paths `ceilings` itself."""
    return ceilings.model_copy(update={"disks": tuple(disks[path] for path in paths)}) if paths else ceilings


def _disk(path: Path) -> DiskCeilings:
    try:
        return _disk_ceilings(path)
    except (OSError, RuntimeError) as error:
        if isinstance(error, SlideError):
            raise
        why = getattr(error, "strerror", None) or error
        raise SlideError(f"--path {path} cannot be measured ({why}); name a directory on a local disk") from error


def _kept(file: Path, key: dict[str, Any]) -> Ceilings | None:
    """Return the kept ceilings; None where the file is missing, is from another machine, or is damaged. Then they are
    measured again."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, SlideError):
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["key"] == key:
            return checked(found["ceilings"], str(file))
    return None


def _keep(file: Path, key: dict[str, Any], ceilings: Ceilings) -> None:
    """Write the file. Where the folder cannot be written, the next command only measures again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({"key": key, "ceilings": ceilings.model_dump()}, indent=2) + "\n", encoding="utf-8")
        new.replace(file)


# ----------------------------------------------------------------------------------------------------------------------
# Measurements.

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
_CPU_SHAPE = (512, 512, 512)


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
    done the work. There are `AMOUNTS.rounds` of them after one that warms up, or as many as fill `least_s`."""

    device: torch.device
    least_s: float | None = None
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


def _gpu_ceilings(device: torch.device) -> GpuCeilings:
    """Measure the ceilings of a CUDA device. Takes 2 GiB there and 1 GiB of page-locked memory."""
    # Random contents: zeros run measurably faster through the matrix units.
    host_out = torch.randint(256, (AMOUNTS.copied_bytes,), dtype=torch.uint8).pin_memory()
    host_in = torch.empty(AMOUNTS.copied_bytes, dtype=torch.uint8, pin_memory=True)
    device_in = torch.empty(AMOUNTS.copied_bytes, dtype=torch.uint8, device=device)
    device_out = torch.randint(256, (AMOUNTS.copied_bytes,), dtype=torch.uint8, device=device)
    h2d = (torch.cuda.Stream(device), device_in, host_out)
    d2h = (torch.cuda.Stream(device), host_in, device_out)
    attention = {
        str(tokens): rates for count, tokens in AMOUNTS.attention if (rates := _attention_rates(count, tokens, device))
    }
    return GpuCeilings(
        name=torch.cuda.get_device_name(device),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory,
        product_tflop_s={"x".join(map(str, shape)): _product_rate(shape, device) for shape in SHAPES},
        copy_gb_s=2 * _copy_rate((torch.cuda.current_stream(device), device_in, device_out)),
        h2d_gb_s=_copy_rate(h2d),
        d2h_gb_s=_copy_rate(d2h),
        both_ways_gb_s=_copy_rate(h2d, d2h),
        attention_tflop_s={tokens: forward for tokens, (forward, _) in attention.items()},
        attention_backward_tflop_s={tokens: backward for tokens, (_, backward) in attention.items()},
    )


def _copy_rate(*copies: tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor]) -> float:
    """Measure the GB/s of each of `copies` (stream, target, source), all of them at once."""
    rounds = _Rounds(copies[0][1].device if copies[0][1].is_cuda else copies[0][2].device)
    for _ in rounds:
        for stream, target, source in copies:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
    return AMOUNTS.copied_bytes / rounds.seconds / 1e9


def _product_rate(shape: tuple[int, int, int], device: torch.device) -> float:
    """Measure the TFLOP/s of one product. The right matrix lies in memory like a linear layer's weight, [columns,
    inner]. Stored as [inner, columns] it is slower in some shapes: 16384x11008x2048 did 532 to 636 TFLOP/s then on
    H100s, and 670 like a linear layer (benchmarks/results/2026-11-26_nvidia-h100_host-and-kernels.md)."""
    rows, columns, inner = shape
    left = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    right = torch.randn(columns, inner, device=device, dtype=torch.bfloat16).t()
    product = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
    times = 10
    warm_up_and_count = [_Rounds(device, AMOUNTS.warm_s), _Rounds(device, AMOUNTS.products_s)]
    for rounds in warm_up_and_count if device.type == "cuda" else [_Rounds(device)]:
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

    forward, backward = _Rounds(device), _Rounds(device)
    for _ in forward:
        functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    made = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    gradient = torch.randn_like(made)
    for _ in backward:
        torch.autograd.grad(made, (query, key, value), gradient, retain_graph=True)
    product = count * AMOUNTS.heads * tokens**2 * ATTENTION_WIDTH  # half of a matrix, two operations each
    return 2 * product / forward.seconds / 1e12, 5 * product / backward.seconds / 1e12


def _cpu_ceilings(name: str, threads: int, cores: Sequence[int], *, with_products: bool) -> CpuCeilings:
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


def _updated() -> Elements:
    """Return a unit in host memory, with all pages touched."""
    weight, gradient = (torch.ones(AMOUNTS.updated, dtype=torch.bfloat16) for _ in range(2))
    remainder = torch.zeros(AMOUNTS.updated, dtype=torch.int16)
    return Elements(weight, remainder, [torch.full((AMOUNTS.updated,), 0.1) for _ in range(2)], gradient)


def _update_rate(threads: int, cores: Sequence[int]) -> float:
    """Measure the GB/s of AdamW in fp32."""
    updater = CpuUpdater(threads, cores)
    most = psutil.virtual_memory().available // 4 // (14 * AMOUNTS.updated)
    units = itertools.cycle([_updated() for _ in range(max(1, min(AMOUNTS.units, most)))])
    hyper = AdamWHyper(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=10)

    rounds = _Rounds(torch.device("cpu"))
    try:
        for _ in rounds:
            updater.update_(next(units), hyper, grad_scale=0.5)
    finally:
        updater.end_threads()
    return UPDATE_BYTES * AMOUNTS.updated / rounds.seconds / 1e9


def _host_copy_rate() -> float:
    """Measure the GB/s that a copy on torch's threads reads and writes."""
    source = torch.ones(AMOUNTS.copied_bytes // 4, dtype=torch.uint8)
    target = torch.empty_like(source)
    rounds = _Rounds(torch.device("cpu"))
    for _ in rounds:
        target.copy_(source)
    return 2 * source.numel() / rounds.seconds / 1e9


def _disk_ceilings(directory: Path) -> DiskCeilings:
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
