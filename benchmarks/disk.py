"""What the disk gave and what a training step asked of it: the rows of `--offload nvme`."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ds_slide import _native
from ds_slide.store.ssd.bandwidth import Load, OpenFile, put_load

CEILING_SECONDS = 2.4
# Each of its halves holds what a disk of 4 GB/s reads or writes in that time.
CEILING_FILE_BYTES = 8 << 30
STATES_SECONDS = 12.0
# Larger requests and more of them gave no more on any disk tried, nor did bursts of reads and writes in turns.
REQUEST_BYTES = 2 << 20
DEPTH = 32
# As much as an engine has between disk and update: where a processor copies what the disk moves, as in a virtual
# machine, few buffers stay in its cache.
MEMORY_BYTES = 1 << 30
# More than DEPTH, so that the disk never waits for the thread that hands them over.
AHEAD = DEPTH + DEPTH // 4
LEAST_FILE_BYTES = 2 * DEPTH * REQUEST_BYTES
_SECTOR_BYTES = 512


def ceiling(folder: str) -> dict[str, Any]:
    """Mixed bandwidth of the disk that holds `folder`, on a file that is gone afterwards."""
    free = shutil.disk_usage(folder).free
    with full_file(Path(folder), min(CEILING_FILE_BYTES, free // 4 // REQUEST_BYTES * REQUEST_BYTES)) as path:
        return mixed_ceiling(path, CEILING_SECONDS)


@contextmanager
def full_file(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file of `nbytes` random bytes (multiple of 2 MiB), all of it on the disk, removed at the end.

    Extents that were only reserved read as zeros without the disk, and zeros may be compressed on the way: so every
    byte is written, and none repeats within 64 MiB. SystemExit where it is too short.
    """
    if nbytes < LEAST_FILE_BYTES:
        raise SystemExit(
            f"a file of {nbytes} bytes is too short to measure a disk on: {DEPTH} requests of {REQUEST_BYTES} bytes, "
            f"read and written, need a half each; make it at least {LEAST_FILE_BYTES} bytes"
        )
    path = folder / f"ds_slide-benchmark-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with engine() as io:
            file = io.open(str(path), nbytes)
            memory = buffers(DEPTH)
            load = Load("write", REQUEST_BYTES, DEPTH)
            full = OpenFile(io, file, nbytes, memory.data_ptr(), DEPTH)
            put_load(full, load, requests=nbytes // REQUEST_BYTES)
            io.sync(file)
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def engine() -> Iterator[_native.IoEngine]:
    # The order of reads and writes is the load's, not the engine's to choose.
    io = _native.IoEngine("auto", DEPTH, REQUEST_BYTES, burst_bytes=0)
    try:
        yield io
    finally:
        io.close()


def buffers(count: int) -> torch.Tensor:
    """Random bytes of `count` requests in page-aligned memory, in huge pages as the engine's own buffers are."""
    memory = torch.frombuffer(_native.Slab(REQUEST_BYTES * count, False, True).memory, dtype=torch.uint8)
    # By words: one number for each byte took five seconds for 1 GiB.
    memory.view(torch.int64).random_()
    return memory


def mixed_ceiling(path: Path, seconds: float) -> dict[str, Any]:
    """The disk's bandwidth in GB/s on an existing full file, reads and writes taking turns in a half of the file each:
    nothing is read again while a host may have it in its cache, if the halves are large enough."""
    count = MEMORY_BYTES // REQUEST_BYTES
    memory, nbytes = buffers(count), path.stat().st_size
    with engine() as io:
        file = io.open(str(path), 0)
        io.register_memory(memory.data_ptr(), memory.numel())
        load = Load("mixed", REQUEST_BYTES, AHEAD)
        sample = put_load(OpenFile(io, file, nbytes, memory.data_ptr(), count), load, seconds=seconds)
        return {
            "gb_s": sample.gb_s,
            "read_gb_s": sample.read_bytes / sample.seconds / 1e9,
            "write_gb_s": sample.written_bytes / sample.seconds / 1e9,
            "file_bytes": nbytes,
            "backend": io.stats()["backend"],
            "direct": io.is_direct(file),
        }


@contextmanager
def states_kept(folder: str) -> Iterator[Path | None]:
    """The largest file that a system has in its folder, held open, so that its bytes stay where they are on the disk
    when the system removes it, until the end of the block or of the process. None where it is smaller than a ceiling's
    own file."""
    largest = max((path for path in Path(folder).rglob("*") if path.is_file()), key=_size, default=None)
    if largest is None or _size(largest) < CEILING_FILE_BYTES:
        yield None
        return
    descriptor = os.open(largest, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    return path.stat().st_size


def ceiling_of_states(path: Path) -> dict[str, Any]:
    """As `ceiling`, on a state file whose engine is gone, and for longer.

    A file that has just been filled may be in the cache of the machine that a virtual disk belongs to, and a disk that
    has rested may be faster for a second than it is for a minute: neither is so for the engine's own traffic.
    """
    return {**mixed_ceiling(path, STATES_SECONDS), "on_states": True}


def empty(folder: str) -> None:
    """Remove all that a system left in its folder."""
    shutil.rmtree(folder)
    Path(folder).mkdir()


def process_bytes() -> dict[str, int]:
    """Bytes that this process, all its threads, had the storage layer read and write since it began."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(fields["read_bytes"]), "written": int(fields["write_bytes"])}


def device_bytes(folder: str) -> dict[str, int]:
    """Bytes read and written by everybody on the block device of `folder`; empty where it has none (tmpfs, overlay)."""
    number = os.stat(folder).st_dev
    stat = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    if not stat.exists():
        return {}
    fields = stat.read_text().split()
    return {"read": int(fields[2]) * _SECTOR_BYTES, "written": int(fields[6]) * _SECTOR_BYTES}


class Traffic:
    """Counts from its construction."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._begin = self._now()

    def _now(self) -> dict[str, int]:
        counters = {"os": process_bytes(), "device": device_bytes(self._folder)}
        return {f"{name}_{way}_bytes": count for name, ways in counters.items() for way, count in ways.items()}

    def since_start(self) -> dict[str, int]:
        """`os_read_bytes`, `os_written_bytes`, and `device_...` where the disk is a block device."""
        now = self._now()
        return {name: now[name] - begin for name, begin in self._begin.items()}


def summarise(
    ceilings: list[dict[str, Any]],
    moved: dict[str, int],
    own: list[dict[str, Any]],
    parameters: int,
    steps: int,
    step_s: float,
) -> dict[str, Any]:
    """Flat figures of a record.

    `ceilings`: before, and after where it is known; the bound takes the mean of those on a file made for them, or the
    one on the engine's own states. `moved`: bytes of all timed steps by the operating system. `own`:
    what the engine counted in every timed step (`slide_stats()["ssd"]`), empty for stock.
    """
    per_step = {name: count / steps for name, count in moved.items()}
    if own:
        for way in ("read", "written"):
            per_step[f"ssd_{way}_bytes"] = sum(step[f"{way}_bytes"] for step in own) / steps
    counter = "ssd" if own else "os"
    counted = [found for found in ceilings if found.get("on_states")] or ceilings
    rate = sum(found["gb_s"] for found in counted) / len(counted)
    bound = (per_step[f"{counter}_read_bytes"] + per_step[f"{counter}_written_bytes"]) / (rate * 1e9)
    return {
        **{f"{name}_per_step": count for name, count in per_step.items()},
        **{f"{name}_per_parameter": count / parameters for name, count in per_step.items()},
        "ssd_ceiling": dict(zip(("before", "after"), ceilings, strict=False)),
        "ssd_gb_s": rate,
        "ssd_direct": all(found["direct"] for found in ceilings),
        "ssd_bound_s": bound,
        "step_over_ssd_bound": step_s / bound if bound else None,
    }
