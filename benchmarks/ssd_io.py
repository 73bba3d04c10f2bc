"""The I/O engine beside fio and DeepSpeed's aio handle: one file, one run, in turns.

    python3 benchmarks/ssd_io.py --path DIR --size 4GiB --seconds 2 --out DIR
    python3 benchmarks/ssd_io.py --path DIR --quick --out DIR        # under a minute

Sequential reads, writes, both mixed one to one, and alternating bursts of 64 MiB, at request sizes of 256 KiB to 4 MiB
and depths of 1 to 64. Every system does the same to the same file with the same request size, depth and kernel
interface; they take turns in an order drawn anew for every round (seeded), so that a disk that changes its speed, or a
host that remembers what the system before has read, does so for all. `fio` is found on the PATH; DeepSpeed compiles its
operator at the first use (two minutes), for which it needs libaio's headers. What is absent is said.
"""

from __future__ import annotations

import argparse
import datetime
import random
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import page
from io_rivals import DeepSpeedAio, Fio
from ssd import PATTERNS, Sample, full_file, parse_size, run_engine, size_text
from tqdm import tqdm

BACKENDS = ("io_uring", "libaio", "threads")
MAIN_CASE = (1 << 20, 32)
REQUEST_SIZES = (256 << 10, 1 << 20, 2 << 20, 4 << 20)
DEPTHS = (1, 4, 8, 32, 64)

Run = Callable[[], Sample]


@dataclass(frozen=True)
class Case:
    """One load: a pattern of `ssd.PATTERNS`, bytes of a request, requests in flight."""

    pattern: str
    request_bytes: int
    depth: int


@dataclass
class Row:
    """One system under one load; GB/s and percentiles of the latency in ms are medians over the rounds."""

    pattern: str
    request: str
    depth: int
    system: str
    gb_s: float
    gb_s_min: float
    gb_s_max: float
    p50_ms: float | None
    p99_ms: float | None
    rounds: int
    over_fio: float | None = None
    over_deepspeed: float | None = None


def cases(quick: bool) -> list[Case]:
    """All patterns at the main size and depth first; then other sizes at this depth and other depths at this size."""
    size, depth = MAIN_CASE
    chosen = [Case(pattern, size, depth) for pattern in PATTERNS]
    if not quick:
        chosen += [Case(p, other, depth) for p in PATTERNS[:3] for other in REQUEST_SIZES if other != size]
        chosen += [Case(p, size, other) for p in PATTERNS[:3] for other in DEPTHS if other != depth]
    return chosen


class Systems:
    """Who takes part, and who cannot, with the reason."""

    def __init__(self, path: Path, quick: bool) -> None:
        self._path, self._quick = path, quick
        self.absent: dict[str, str] = {}
        self.direct: dict[str, bool] = {}
        self._backends = [backend for backend in BACKENDS if self._works(backend)]
        self._fio = self._try("fio", lambda: Fio(path))
        self._deepspeed = self._try("deepspeed", lambda: DeepSpeedAio(path))

    def _try(self, name: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:
            self.absent[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            return None

    def _works(self, backend: str) -> bool:
        def once() -> bool:
            _, stats = run_engine(self._path, "read", backend, 1, 1 << 20, 0.0)
            self.direct[backend] = stats["direct"]
            return True

        return bool(self._try(f"engine {backend}", once))

    def of(self, case: Case, seconds: float) -> dict[str, Run]:
        """The systems of one case by name. Other backends than the first take part in a full run's main cases."""
        shape = (case.pattern, case.depth, case.request_bytes, seconds)
        main = (case.request_bytes, case.depth) == MAIN_CASE and not self._quick
        backends = self._backends if main else self._backends[:1]
        runs: dict[str, Run] = {}
        for backend in backends:
            runs[f"engine {backend}"] = lambda backend=backend: run_engine(
                self._path, case.pattern, backend, case.depth, case.request_bytes, seconds
            )[0]
            if self._fio is not None and case.pattern in Fio.PATTERNS:
                direct = self.direct[backend]
                runs[f"fio {backend}"] = lambda backend=backend, direct=direct: self._fio.run(*shape, backend, direct)
        if self._deepspeed is not None:
            runs["deepspeed aio"] = lambda: self._deepspeed.run(*shape)
        return runs


def row_of(case: Case, system: str, samples: list[Sample]) -> Row:
    rates = [sample.gb_s for sample in samples]

    def milliseconds(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) * 1e3 if known else None

    return Row(
        case.pattern,
        size_text(case.request_bytes),
        case.depth,
        system,
        statistics.median(rates),
        min(rates),
        max(rates),
        milliseconds([sample.p50_s for sample in samples]),
        milliseconds([sample.p99_s for sample in samples]),
        len(samples),
    )


def compare(samples: dict[str, list[Sample]], rows: list[Row]) -> None:
    """Fill in the ratios of the engine's rows: the median over the rounds of the ratio within a round."""

    def ratio(ours: list[Sample], theirs: list[Sample]) -> float:
        return statistics.median(our.gb_s / their.gb_s for our, their in zip(ours, theirs, strict=True))

    for row in rows:
        kind, _, backend = row.system.partition(" ")
        if kind != "engine":
            continue
        if f"fio {backend}" in samples:
            row.over_fio = ratio(samples[row.system], samples[f"fio {backend}"])
        if "deepspeed aio" in samples:
            row.over_deepspeed = ratio(samples[row.system], samples["deepspeed aio"])


def measure(systems: Systems, chosen: list[Case], seconds: float, rounds: int) -> list[Row]:
    random.seed(0)
    planned = [(case, systems.of(case, seconds)) for case in chosen]
    rows: list[Row] = []
    with tqdm(total=rounds * sum(len(runs) for _, runs in planned), unit="run") as bar:
        for case, runs in planned:
            samples: dict[str, list[Sample]] = {name: [] for name in runs}
            for _ in range(rounds):
                for name, run in random.sample(sorted(runs.items()), len(runs)):
                    bar.set_description(f"{case.pattern} {size_text(case.request_bytes)} depth {case.depth}: {name}")
                    samples[name].append(run())
                    bar.update()
            here = [row_of(case, name, found) for name, found in samples.items()]
            compare(samples, here)
            rows += here
    return rows


def filesystem_of(folder: Path) -> str:
    """Type of the filesystem that `folder` is on, as the kernel names it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [(mount, kind) for mount, kind in mounts if folder.resolve().is_relative_to(mount)]
    return max(holding, key=lambda found: len(found[0]))[1]


def table(rows: list[Row]) -> list[list[str]]:
    titles = ["pattern", "request", "depth", "system", "GB/s", "lowest - highest", "p50 ms", "p99 ms", "x fio"]
    lines = [
        [
            row.pattern,
            row.request,
            str(row.depth),
            row.system,
            f"{row.gb_s:.2f}",
            f"{row.gb_s_min:.2f} - {row.gb_s_max:.2f}",
            page.number(row.p50_ms, ".2f"),
            page.number(row.p99_ms, ".2f"),
            page.number(row.over_fio, ".3f"),
            page.number(row.over_deepspeed, ".2f"),
        ]
        for row in rows
    ]
    return [[*titles, "x DeepSpeed"], *lines]


LEGEND = """\
* GB/s: bytes read and written, median over the rounds; the systems take turns within a round.
* x fio, x DeepSpeed: median over the rounds of the ratio of the round's two runs. fio uses the same kernel interface,
  request size and depth on the same file (`threads`: psync with as many jobs).
* latency: the engine's from submit to completion with a few requests more than the depth handed over, so its wait for
  a free place is in it; fio's is that of the device (clat), in mixed the longer of reads and writes. In bursts a
  request is 64 MiB. DeepSpeed's handle tells only when all of its transfers are done.
* DeepSpeed: block size and queue depth as stated, overlap_events on, the faster of intra_op_parallelism 1 and 4 (tried
  before every case; with 4 each thread has a queue of that depth), transfers of 64 MiB, four handed over at once; in
  mixed, reads and writes by a handle each."""


def write_files(folder: Path, facts: dict[str, str], command: str, rows: list[Row]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{facts['date'][:10]}_{machine.short_name()}_io"
    lines: list[dict[str, Any]] = [{"facts": facts, "command": command}, *map(asdict, rows)]
    stem.with_suffix(".jsonl").write_text(page.json_lines(lines))
    parts = [
        f"# io: {machine.short_name()}, {facts['date'][:10]}",
        "\n".join(f"* {name}: {value}" for name, value in facts.items()),
        page.markdown_table(table(rows)),
        LEGEND,
        f"Run with\n\n```\n{command}\n```",
    ]
    stem.with_suffix(".md").write_text("\n\n".join(parts) + "\n")
    return stem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--size", type=parse_size, default=4 << 30, help="bytes of the file, for instance 4GiB")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every system and case")
    parser.add_argument("--quick", action="store_true", help="one size and depth, 1 GiB, 0.5 s, first backend only")
    parser.add_argument("--out", type=Path, required=True, help="folder for page and JSON lines")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size, arguments.seconds = min(arguments.size, 1 << 30), min(arguments.seconds, 0.5)
    # As an exception, so that the file goes even when the benchmark is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    begin = time.monotonic()
    with full_file(arguments.path, arguments.size) as path:
        systems = Systems(path, arguments.quick)
        rows = measure(systems, cases(arguments.quick), arguments.seconds, arguments.rounds)
    hidden = {str(arguments.path), str(arguments.out)}
    command = "python3 benchmarks/ssd_io.py " + shlex.join("DIR" if word in hidden else word for word in sys.argv[1:])
    buffered = [backend for backend, direct in systems.direct.items() if not direct]
    facts = {
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        **machine.describe(),
        "filesystem": filesystem_of(arguments.path),
        "file": f"{arguments.size / 2**30:g} GiB, {arguments.seconds:g} s a run, {arguments.rounds} rounds",
        "page cache": f"NOT kept out: no O_DIRECT with {', '.join(buffered)}" if buffered else "kept out (O_DIRECT)",
        "absent": "; ".join(f"{name} ({why})" for name, why in systems.absent.items()) or "none",
        "took": f"{time.monotonic() - begin:.0f} s",
    }
    stem = write_files(arguments.out, facts, command, rows)
    print(page.plain(table(rows)))
    print("\n".join(f"absent: {name}: {why}" for name, why in systems.absent.items()))
    print(f"written: {stem}.md, .jsonl")


if __name__ == "__main__":
    main()
