"""What checksums cost the I/O engine: the same load on the same file with them and without, in turns.

    python3 benchmarks/io_checksums.py --path DIR [--size 4GiB] [--seconds 2] [--rounds 5]

Every page that is written gets its sum and every page that is read is compared with it, by the thread that hands the
transfers over, with the helpers that an engine would give it. Prints one JSON line: for each pattern the median of the
ratio of the bandwidths within a round, less one, and both bandwidths.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from ssd import CEILING_DEPTH, CEILING_MEMORY_BYTES, buffers, engine, full_file, parse_size, run_engine
from tqdm import tqdm

from ds_slide.store.ssd.disk_load import next_done
from ds_slide.store.ssd.extents import PAGE
from ds_slide.store.ssd.page_sums import MOST_THREADS, PageSums

PATTERNS = ("read", "write", "mixed")
REQUEST_BYTES = 1 << 20
READ_BYTES = 4 << 20


def sums_of(path: Path) -> PageSums:
    """The sums of the whole file as it is on the disk."""
    nbytes = path.stat().st_size
    sums = PageSums(torch.empty(nbytes // PAGE, dtype=torch.int32), MOST_THREADS)
    memory = buffers(READ_BYTES, 1)
    with engine("auto", 8, READ_BYTES) as io:
        file = io.open(str(path), 0)
        for offset in tqdm(range(0, nbytes, READ_BYTES), "reading the file", leave=False):
            io.submit(offset, False, [(file, offset, memory.data_ptr(), READ_BYTES)], False)
            next_done(io)
            sums.keep(offset, memory.data_ptr(), READ_BYTES)
    return sums


def measure(path: Path, seconds: float, rounds: int) -> dict[str, Any]:
    sums = sums_of(path)
    record: dict[str, Any] = {"file_bytes": path.stat().st_size, "request_bytes": REQUEST_BYTES, "depth": CEILING_DEPTH}
    for pattern in PATTERNS:
        rates: dict[bool, list[float]] = {False: [], True: []}
        done = 0
        for number in range(rounds):
            for checked in (False, True) if number % 2 else (True, False):
                # Off, a write marks its pages as not known, and those pass every check.
                sums.is_on = checked
                sample, stats = run_engine(
                    path, pattern, "auto", CEILING_DEPTH, REQUEST_BYTES, seconds, CEILING_MEMORY_BYTES, done, sums
                )
                done += max(sample.read_bytes, sample.written_bytes)
                rates[checked].append(sample.gb_s)
        record[pattern] = {
            "cost": 1 - statistics.median(on / off for off, on in zip(rates[False], rates[True], strict=True)),
            "off_gb_s": statistics.median(rates[False]),
            "on_gb_s": statistics.median(rates[True]),
        }
    return record | {"backend": stats["backend"], "direct": stats["direct"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--size", type=parse_size, default=4 << 30, help="bytes of the file, for instance 4GiB")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with full_file(arguments.path, arguments.size) as path:
        print(json.dumps(measure(path, arguments.seconds, arguments.rounds)))


if __name__ == "__main__":
    main()
