"""Every Triton kernel beside eager PyTorch, torch.compile, torch's own fused operations and Liger-Kernel.

    python3 benchmarks/kernel_speed.py --out out/                    # all of it: some minutes on an H200
    python3 benchmarks/kernel_speed.py --out out/ --only 'loss|rope'  # a part: a regular expression of kernel names
    python3 benchmarks/kernel_speed.py --out out/ --quick            # two shapes each; without CUDA tiny ones

torch.compile takes longer than everything else. For all shapes, first fill its cache with several processes at once,
each with a part of the kernels: `--only 'loss' --compile-only --compile-shapes 99`, and so on.

Times on the GPU's stream with the systems in turns, bandwidth and TFLOP/s beside the walls of the same run, memory,
and errors against fp64 of every system, so that speed is not bought with precision. Without CUDA, `--quick` runs the
kernels in Triton's interpreter (TRITON_INTERPRET=1) to try the script; its times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import random
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kernel_cases
import kernel_lsp_cases
import kernel_offload_cases
import kernel_page
import machine
import page
import torch
from kernel_clock import Clock, Times, peak_bytes
from kernel_page import COPY, GEMMS, OURS, Row
from kernel_problem import Problem, System, errors

ON_GPU = torch.cuda.is_available()
QUICK_SHAPES = 2


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


class Budget:
    """Seconds that compiling may take, and shapes of each kernel that are compiled."""

    def __init__(self, seconds: float, shapes: int) -> None:
        self._left, self._shapes = seconds, shapes

    def refusal(self, position: int) -> str:
        """Why the shape at `position` of its kernel is not compiled; empty if it is."""
        if not ON_GPU:
            return "not compiled without CUDA"
        if position >= self._shapes:
            return f"only the first {self._shapes} shapes are compiled (--compile-shapes)"
        return "" if self._left > 0 else "the time for compiling was spent (--compile-seconds)"

    def spend(self, seconds: float) -> None:
        self._left -= seconds


class Measurement:
    """All systems on one problem."""

    def __init__(self, problem: Problem, position: int, clock: Clock, copy_gb_s: float | None, budget: Budget) -> None:
        self._problem, self._clock, self._copy_gb_s = problem, clock, copy_gb_s
        self._budget, self._position = budget, position
        self.rows = {
            (name, mode): Row(problem.kernel, problem.shape, mode, name)
            for mode in problem.modes
            for name in problem.systems
        }
        self._ready: dict[str, System] = {}
        self._restored: set[str] = set()

    def _fail(self, name: str, why: str) -> None:
        self._ready.pop(name, None)
        for mode in self._problem.modes:
            self.rows[name, mode].note = why

    def try_all(self) -> None:
        """First calls, errors and memory; a system that fails keeps its rows, with the reason."""
        expected = self._problem.reference()
        for name, make in self._problem.systems.items():
            refusal = self._budget.refusal(self._position) if name == "compile" else ""
            if refusal:
                self._fail(name, refusal)
                continue
            begin = time.perf_counter()
            try:
                self._ready[name] = make()
                for mode in self._problem.modes:
                    self._first_calls(name, mode, expected)
                    if name == "compile":
                        self.rows[name, mode].compile_s = time.perf_counter() - begin
            except Exception as error:
                self._fail(name, reason(error))
            finally:
                self._problem.restore()
            if name == "compile":
                self._budget.spend(time.perf_counter() - begin)
            free()
        for mode in self._problem.modes:
            for name, why in self._problem.absent.items():
                self.rows[name, mode] = Row(self._problem.kernel, self._problem.shape, mode, name, note=why)

    def _first_calls(self, name: str, mode: str, expected: dict[str, torch.Tensor]) -> None:
        problem, row = self._problem, self.rows[name, mode]
        results = problem.run(self._ready[name], mode)
        row.errors = errors(results, expected)
        row.max_error = max(error["max"] for error in row.errors.values())
        row.l2_error = max(error["l2"] for error in row.errors.values())
        if problem.overwrites():
            self._restored.add(name)
            # Operations in place return their inputs; all others should leave them as they are.
            if not any(tensor is result for tensor in problem.inputs.values() for result in results.values()):
                row.note = "overwrites its inputs"
        del results
        problem.restore()
        free()
        given = [*problem.inputs.values(), *problem.upstream]
        work = lambda: problem.run(self._ready[name], mode).values()  # noqa: E731
        row.peak_bytes, row.beyond_results_bytes = peak_bytes(work, given)
        problem.restore()

    def time_all(self) -> list[Row]:
        for mode in self._problem.modes:
            problem, ready = self._problem, self._ready
            works: dict[str, Callable[[], object]] = {
                name: lambda system=system, mode=mode, problem=problem: problem.run(system, mode)  # type: ignore[misc]
                for name, system in ready.items()
            }
            if OURS not in works:
                continue
            if problem.gemms is not None:
                works[GEMMS] = problem.gemms()[mode]
            elif ON_GPU:
                works[COPY] = self._clock.copy_of(problem.bytes_of(mode))
            again = {name: problem.restore for name in ready if name in self._restored}
            times = self._clock.in_turns(works, again)
            for name, found in times.items():
                row = self.rows.setdefault((name, mode), Row(problem.kernel, problem.shape, mode, name))
                self._fill(row, found, times)
            del works
            problem.restore()
            free()
        order = {name: place for place, name in enumerate([*self._problem.systems, "liger", COPY, GEMMS])}
        return sorted(self.rows.values(), key=lambda row: (self._problem.modes.index(row.mode), order[row.system]))

    def _fill(self, row: Row, found: Times, all_times: dict[str, Times]) -> None:
        problem, seconds = self._problem, found.median / 1e3
        row.ms, row.ms_min, row.ms_max = found.median, min(found.ms), max(found.ms)
        row.host_ms, row.rounds = found.host_ms, len(found.ms)

        def share(wall: Times) -> float:
            return statistics.median(least / own for least, own in zip(wall.ms, found.ms, strict=True))

        row.over_ours = 1 / share(all_times[OURS])
        if not ON_GPU:
            return
        if problem.flops:
            row.tflop_s = problem.flops_of(row.mode) / seconds / 1e12
            row.share_of_gemms = share(all_times[GEMMS])
            return
        row.gb_s = problem.bytes_of(row.mode) / seconds / 1e9
        row.share_of_copy = row.gb_s / self._copy_gb_s if self._copy_gb_s else None
        row.share_of_same_copy = share(all_times[COPY])


def free() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def chosen_problems(arguments: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, int, Problem]]:
    """(kernel, position of the shape among those of its kernel, problem), a problem at a time: inputs take memory."""
    for source in (kernel_cases, kernel_offload_cases, kernel_lsp_cases):
        for kernel, problems in source.makers(device, not ON_GPU):
            if not re.search(arguments.only, kernel):
                continue
            for position, make in enumerate(problems[:QUICK_SHAPES] if arguments.quick else problems):
                torch.manual_seed(position)
                yield kernel, position, make()


def measure(arguments: argparse.Namespace, clock: Clock, copy_gb_s: float | None) -> Iterator[list[Row]]:
    """Rows of one problem after the other."""
    budget = Budget(arguments.compile_seconds, arguments.compile_shapes)
    for kernel, position, problem in chosen_problems(arguments, clock.device):
        begin = time.perf_counter()
        measurement = Measurement(problem, position, clock, copy_gb_s, budget)
        del problem
        measurement.try_all()
        rows = measurement.time_all()
        del measurement
        free()
        print(f"{kernel} {rows[0].shape}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
        yield rows


def fill_caches(arguments: argparse.Namespace, device: torch.device) -> None:
    """First calls of what is compiled, Triton kernels and torch.compile, for a later run with the same options."""
    budget = Budget(float("inf"), arguments.compile_shapes)
    for kernel, position, problem in chosen_problems(arguments, device):
        begin = time.perf_counter()
        for name in (OURS, "compile"):
            if name not in problem.systems or (name == "compile" and budget.refusal(position)):
                continue
            try:
                system = problem.systems[name]()
                for mode in problem.modes:
                    problem.run(system, mode)
            except Exception as error:  # the timed run reports it
                print(f"{name}: {reason(error)}", file=sys.stderr)
            problem.restore()
        print(f"{kernel} {problem.shape}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
        del problem
        free()


def markdown(facts: dict[str, str], command: str, rows: list[Row]) -> str:
    parts = [f"# kernels: {machine.short_name()}, {facts['date'][:10]}"]
    if not ON_GPU:
        parts.append("**Tiny sizes in Triton's interpreter on the processor: the times mean nothing.**")
    parts += ["\n".join(f"* {name}: {value}" for name, value in facts.items()), kernel_page.verdict(rows)]
    parts += [page.markdown_table(kernel_page.summary(rows)), kernel_page.SUMMARY_LEGEND]
    for kernel, found in kernel_page.by_kernel(rows).items():
        parts.append(f"## {kernel}\n\n{page.markdown_table(kernel_page.table(found))}")
    return "\n\n".join([*parts, kernel_page.LEGEND, f"Run with\n\n```\n{command}\n```"]) + "\n"


def write(stem: Path, facts: dict[str, str], command: str, rows: list[Row]) -> None:
    lines: list[dict[str, Any]] = [{"facts": facts, "command": command}, *map(dataclasses.asdict, rows)]
    stem.with_suffix(".jsonl").write_text(page.json_lines(lines))
    stem.with_suffix(".md").write_text(markdown(facts, command, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for page and JSON lines")
    parser.add_argument("--only", default="", help="regular expression: the kernels whose name it matches")
    parser.add_argument("--quick", action="store_true", help="two shapes of each kernel; tiny ones without CUDA")
    parser.add_argument("--compile-shapes", type=int, default=3, help="shapes of each kernel to torch.compile for")
    parser.add_argument("--compile-seconds", type=float, default=100.0, help="for all compilations together")
    parser.add_argument(
        "--compile-only", action="store_true", help="fill the compilers' caches; parts may run at the same time"
    )
    arguments = parser.parse_args()
    if not ON_GPU and not arguments.quick:
        parser.error("there is no CUDA device: only --quick runs without one, and its times mean nothing")
    device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
    if arguments.compile_only:
        fill_caches(arguments, device)
        return
    random.seed(0)
    begin = time.monotonic()
    clock = Clock(device)
    copy_gb_s = clock.copy_gb_s()
    arguments.out.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.timezone.utc)
    part = "".join("-" + name for name in re.findall(r"\w+", arguments.only))
    stem = arguments.out / f"{now:%Y-%m-%d}_{machine.short_name()}_kernels{part}"
    words = ["DIR" if word == str(arguments.out) else word for word in sys.argv[1:]]
    command = "python3 benchmarks/kernel_speed.py " + shlex.join(words)
    facts = {
        "date": f"{now:%Y-%m-%d %H:%M} UTC",
        **machine.describe(),
        "copy of 1 GiB": f"{copy_gb_s:,.0f} GB/s (read + write)" if copy_gb_s else "not measured",
        "dtype": "bf16",
    }
    rows: list[Row] = []
    for found in measure(arguments, clock, copy_gb_s):
        rows += found
        facts["took"] = f"{time.monotonic() - begin:.0f} s"
        # After every problem: a run that is stopped keeps what it has.
        write(stem, facts, command, rows)
    if not rows:
        parser.error(f"--only {arguments.only!r} matches no kernel")
    print(page.plain(kernel_page.summary(rows)))
    print(kernel_page.verdict(rows))
    print(f"written: {stem}.md, .jsonl")
    failed = sorted({f"{row.kernel} {row.shape}: {row.note}" for row in rows if row.system == OURS and row.ms is None})
    if failed:
        sys.exit("ours did not run:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
