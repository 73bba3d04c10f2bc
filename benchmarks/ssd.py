"""A file on the disk under test, the load that `ds_slide._native.IoEngine` puts on it, and the disk's own ceiling.

    python3 benchmarks/ssd.py --path DIR [--seconds 3] [--size 4GiB]

Prints one JSON line: the mixed bandwidth with several requests in flight, the page cache kept out. `step.py` asks for
the same figure right before and after the engine: disks of one kind differ threefold, and one disk changes with time.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ds_slide import _native
from ds_slide.store.ssd.disk_load import Load, Sample, put_load

PATTERNS = ("read", "write", "mixed", "bursts")
BURST_BYTES = 64 << 20
FILL_BYTES = 4 << 20
FILL_PART_BYTES = 256 << 20
# What the ceiling is measured with; larger requests and more of them gave no more on any disk tried.
CEILING_REQUEST_BYTES = 2 << 20
CEILING_DEPTH = 32
# As much as an engine has between disk and update.
CEILING_MEMORY_BYTES = 1 << 30


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `256KiB`, `1MiB` or a plain number."""
    for suffix, factor in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)):
        if text.endswith(suffix):
            return round(float(text.removesuffix(suffix)) * factor)
    return int(text)


def size_text(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


@contextmanager
def full_file(folder: Path, nbytes: int, progress: bool = True) -> Iterator[Path]:
    """A file of `nbytes` random bytes (multiple of 4 MiB), all of it on the disk, removed at the end.

    Extents that were only reserved read as zeros without the disk, and zeros may be compressed on the way: so every
    byte is written, and none repeats within 4 MiB. SystemExit where it is too short for bursts.
    """
    if nbytes < 2 * BURST_BYTES:
        raise SystemExit(
            f"a file of {nbytes} bytes is too short to measure a disk on: bursts of 64 MiB, read and written, need a "
            f"half each; make it at least {2 * BURST_BYTES} bytes"
        )
    path = folder / f"ds_slide-benchmark-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with engine("auto", 8, FILL_BYTES) as io:
            file = io.open(str(path), nbytes)
            # Of the same bytes: none of them repeats within a request.
            memory = buffers(FILL_BYTES, 1)
            with tqdm(total=nbytes, desc="filling the file", disable=not progress, leave=False, unit="B") as bar:
                for begin in range(0, nbytes, FILL_PART_BYTES):
                    part = min(FILL_PART_BYTES, nbytes - begin)
                    load = Load("write", FILL_BYTES, 8, begin)
                    put_load(io, file, nbytes, (memory.data_ptr(), 1), load, requests=part // FILL_BYTES)
                    bar.update(part)
            io.sync(file)
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def engine(backend: str, depth: int, request_bytes: int) -> Iterator[Any]:
    # The order of reads and writes is the pattern's, not the engine's to choose.
    io = _native.IoEngine(backend, depth, request_bytes, burst_bytes=0)
    try:
        yield io
    finally:
        io.close()


def buffers(nbytes: int, count: int) -> torch.Tensor:
    """Random bytes [count, nbytes] in page-aligned memory, in huge pages as the engine's own buffers are."""
    memory = torch.frombuffer(_native.Slab(nbytes * count, False, True), dtype=torch.uint8)
    # By words: one number for each byte took five seconds for 1 GiB.
    memory.view(torch.int64).random_()
    return memory.view(count, nbytes)


def run_engine(
    path: Path,
    pattern: str,
    backend: str,
    depth: int,
    request_bytes: int,
    seconds: float,
    memory_bytes: int = 0,
    begin_bytes: int = 0,
) -> tuple[Sample, dict[str, Any]]:
    """The load `pattern` for `seconds`: its sample and `{"direct": ..., **engine.stats()}`.

    One transfer is one request, except in `bursts`, where it is 64 MiB. In `mixed` every second one is a write. A few
    more transfers than `depth` are handed over, so that the disk never waits for this thread; their short wait in
    the engine's queue is part of the latency. `memory_bytes`: of the buffers, used in turn, at least as many as are
    needed: where a processor copies what the disk moves, as in a virtual machine, few buffers stay in its cache.
    `begin_bytes`: where in the file, or in each of its halves, the pattern begins.
    """
    burst = pattern == "bursts"
    nbytes = BURST_BYTES if burst else request_bytes
    ahead = 1 if burst else depth + max(2, depth // 4)
    memory = buffers(nbytes, max(ahead, memory_bytes // nbytes))
    load = Load("mixed" if burst else pattern, nbytes, ahead, begin_bytes)
    with engine(backend, depth, request_bytes) as io:
        file = io.open(str(path), 0)
        io.register_memory(memory.data_ptr(), memory.numel())
        file_bytes = path.stat().st_size
        sample = put_load(io, file, file_bytes, (memory.data_ptr(), len(memory)), load, seconds=seconds)
        return sample, {"direct": io.is_direct(file), **io.stats()}


def mixed_ceiling(path: Path, seconds: float, rounds: int = 1) -> dict[str, Any]:
    """The disk's bandwidth in GB/s on an existing full file, read and written: request by request or in bursts,
    whichever is faster, `seconds` each in every round, in turns.

    Both streams go through a half of the file each, and go on where the pattern before them has ended: nothing is read
    again while a host may have it in its cache, if the halves are large enough.
    """
    totals = {"mixed": Sample(), "bursts": Sample()}
    stats: dict[str, Any] = {}
    done = 0
    for pattern, total in list(totals.items()) * rounds:
        sample, stats = run_engine(
            path, pattern, "auto", CEILING_DEPTH, CEILING_REQUEST_BYTES, seconds, CEILING_MEMORY_BYTES, done
        )
        done += max(sample.read_bytes, sample.written_bytes)
        total.read_bytes += sample.read_bytes
        total.written_bytes += sample.written_bytes
        total.seconds += sample.seconds
    best = max(totals.values(), key=lambda sample: sample.gb_s)
    return {
        **{f"{pattern}_gb_s": total.gb_s for pattern, total in totals.items()},
        "gb_s": best.gb_s,
        "read_gb_s": best.read_bytes / best.seconds / 1e9,
        "write_gb_s": best.written_bytes / best.seconds / 1e9,
        "file_bytes": path.stat().st_size,
        "backend": stats["backend"],
        "direct": stats["direct"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--size", type=parse_size, default=4 << 30, help="bytes of the file, for instance 4GiB")
    arguments = parser.parse_args()
    with full_file(arguments.path, arguments.size) as path:
        print(json.dumps(mixed_ceiling(path, arguments.seconds)))


if __name__ == "__main__":
    main()
