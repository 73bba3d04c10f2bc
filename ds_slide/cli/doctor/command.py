"""The answer of `ds-slide doctor`."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from ds_slide.cli.doctor.state import Finding, findings, installed_version, versions
from ds_slide.config import expanded_directory
from ds_slide.plan.ceilings.figures import Ceilings

SCHEMA = 1
TRANSFORMERS = "transformers"
NO_DISKS = ("tmpfs", "ramfs", "overlay")


def run(arguments: argparse.Namespace, say: Any) -> int:
    """Answer with `say`, line by line. Return 0 where DS-Slide can run here, whatever is missing, and 1 where it
    cannot. Raises SlideError for a path that cannot be measured."""
    found = findings()
    can_run = not any(each.fatal for each in found)
    paths = [expanded_directory(path, "--path") for path in arguments.path] or _usual_paths()
    why: list[str] = []
    ceilings = _ceilings(paths, refresh=arguments.refresh, failed=why.append) if can_run else None
    if ceilings is not None:
        found += [*_disks(ceilings, paths), _process(ceilings, why)]
    if arguments.json:
        answer = {
            "schema": SCHEMA,
            "can_run": can_run,
            "findings": [each.as_dict() for each in found],
            "versions": versions(),
            "ceilings": None if ceilings is None else ceilings.model_dump(),
        }
        say(json.dumps(answer, indent=2))
    else:
        for line in _text(found, ceilings, can_run=can_run):
            say(line)
    return 0 if can_run else 1


def _ceilings(paths: Sequence[Path], *, refresh: bool, failed: Callable[[str], None]) -> Ceilings:
    from ds_slide.cli.doctor.cache import of_this_machine

    return of_this_machine(paths, refresh=refresh, failed=failed)


def _usual_paths() -> list[Path]:
    """Return the folder for temporary files, where it is on a disk."""
    folder = Path(tempfile.gettempdir()).resolve()
    parts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    mount = next((str(parent) for parent in (folder, *folder.parents) if str(parent) in parts), "/")
    return [] if parts.get(mount) in NO_DISKS else [folder]


def _disks(ceilings: Ceilings, paths: Sequence[Path]) -> Iterator[Finding]:
    if not paths:
        yield Finding("disk", "none measured", "name a directory on the disk for states with --path")
    for disk in ceilings.disks:
        advice = "" if disk.direct else "its file system refuses O_DIRECT; name a directory on local ext4 or xfs"
        state = f"read {disk.read_gb_s:.2f}, write {disk.write_gb_s:.2f}, mixed {disk.mixed_gb_s:.2f} GB/s"
        yield Finding(f"disk {disk.path}", f"{state} by {disk.backend}", advice)


def _process(ceilings: Ceilings, why: Sequence[str]) -> Finding:
    """Return the finding about a process's memory. `why`: the reasons why it is not measured."""
    if ceilings.process_bytes is None:
        advice = "mend what stops it; until then `ds-slide plan` takes what such a process took elsewhere"
        return Finding("process", f"not measured ({'; '.join(why)})", advice)
    state = f"{ceilings.process_bytes / 1e9:.2f} GB of host memory before an engine is built"
    if installed_version(TRANSFORMERS) is None:
        return Finding("process", f"{state}, without transformers, which is not installed")
    return Finding("process", state)


def _text(found: Sequence[Finding], ceilings: Ceilings | None, *, can_run: bool) -> Iterator[str]:
    width = max(len(each.name) for each in found)
    for each in found:
        yield f"{each.name.ljust(width)}  {each.state}"
    if ceilings is not None:
        for name, rate in _rates(ceilings):
            yield f"{name.ljust(width)}  {rate}"
        yield f"{''.ljust(width)}  {ceilings.source}"
    advices = [each for each in found if each.advice]
    if advices:
        yield ""
        yield "What to do:"
        for each in advices:
            yield f"- {each.name}: {each.advice}"
    if not can_run:
        yield "DS-Slide cannot run here."


def _rates(ceilings: Ceilings) -> Iterator[tuple[str, str]]:
    gpu, cpu = ceilings.gpu, ceilings.cpu
    if gpu is not None:
        for shape, rate in gpu.product_tflop_s.items():
            yield f"product {shape}", f"{rate:.0f} TFLOP/s in bf16"
        for tokens, rate in gpu.attention_tflop_s.items():
            backward = gpu.attention_backward_tflop_s[tokens]
            yield f"attention {tokens} tokens", f"{rate:.0f} TFLOP/s in bf16, causal; backward {backward:.0f}"
        link = f"H2D {gpu.h2d_gb_s:.1f}, D2H {gpu.d2h_gb_s:.1f}, both at once {gpu.both_ways_gb_s:.1f} GB/s each way"
        yield "copies", f"{link}; on the GPU {gpu.copy_gb_s:,.0f} GB/s (read and written)"
    elif cpu.product_tflop_s is not None:
        yield "products", f"{cpu.product_tflop_s:.3f} TFLOP/s in bf16 on the processor, which computes here"
    threads = f"{cpu.update_threads} thread{'s' if cpu.update_threads > 1 else ''}"
    updates = f"{cpu.update_gb_s:.1f} GB/s on {threads}"
    yield "updates", f"{updates}, {cpu.update_gb_s / 26:.2f} G parameters a second (AdamW in fp32, 26 B each)"
    yield "host copy", f"{cpu.copy_gb_s:.1f} GB/s (read and written)"
