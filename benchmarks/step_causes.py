"""What the time of a step goes to: kernels by what launched them, and the GPU's idle time by what the host did then.

    python3 benchmarks/step_causes.py --system slide --model qwen2.5-3b --batch 1 --grad-accum 8 --warmup 14
    deepspeed --num_gpus 2 benchmarks/step_causes.py --system slide --model qwen2.5-3b --batch 1 --grad-accum 4

Takes the options of `step.py`. It profiles two steps after the warm-up with torch.profiler, and prints milliseconds a
step, of rank 0:

    host      what the threads that compute did, one after the other
    kernels   of the GPU, by what the host did when it launched them. Left out are copies from and to host memory, and
              streams on which collectives run
    idle      the GPU had no such kernel to run, and the host did this until it launched the next one

"launched before" is idle time in which the next kernel was on its way already: start of a graph, waits for other
streams. Several ranks get a second table, of the streams of collectives. The profiler makes the host slower, by some 10
us for each range and 1 to 2 us for each operator. So the step takes longer, and the idle time of short parts is too
large. Without a GPU only the host's column is filled.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import json
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import settings
import step
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

STEPS = 2
RANGE, FROM_HERE = "cause: ", "cause from here: "
"""Beginnings of the names of ranges: of one for its own time, and of one for the time until the next one like it."""
WHOLE = "causes of steps"
SCRIPT, EMBEDDING, HEAD = "script, DeepSpeed", "embedding", "head and loss"
WRITTEN, BETWEEN = "blocks as written", "between blocks"
AHEAD, UNKNOWN = "(launched before)", "(unknown)"
KERNELS, CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")


# ---- ranges of the host ----------------------------------------------------------------------------------------------


def around(owner: Any, name: str, cause: str) -> None:
    """Let the calls of a method count as `cause`."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def measured(*args: Any, **kwargs: Any) -> Any:
        with record_function(RANGE + cause):
            return method(*args, **kwargs)

    setattr(owner, name, measured)


def after(owner: Any, name: str, cause: Callable[..., str]) -> None:
    """Let what follows a call of a method count as `cause` of its arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def measured(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        with record_function(FROM_HERE + cause(*args)):
            return result

    setattr(owner, name, measured)


def name_causes() -> None:
    """Name what DS-Slide does. Inner ranges count for themselves."""
    from ds_slide.runtime.captured.block import CapturedBlock, Recording
    from ds_slide.runtime.captured.graphs import Graph, Lent
    from ds_slide.runtime.engine import SlideRuntime
    from ds_slide.runtime.gradients.taking import Taking

    around(Graph, "replay", "blocks, replayed")
    around(Recording, "fill", "copies of inputs of recordings")
    around(CapturedBlock, "results", "copies of results of recordings")
    around(CapturedBlock, "backward", "copies of gradients of recordings")
    around(CapturedBlock, "_forward", "calls of recordings")
    around(Lent, "give", "gradients of recordings added")
    around(Taking, "finalize_block", "gradients packed and added")
    around(Taking, "finalize_rest", "gradients packed and added")
    around(SlideRuntime, "step", "update")
    for name in ("enter_forward", "leave_forward", "enter_backward", "leave_backward"):
        around(SlideRuntime, name, "the engine's hooks of blocks")
    after(SlideRuntime, "begin_forward", lambda *_: f"{EMBEDDING}, forward")
    after(SlideRuntime, "enter_forward", lambda *_, **__: f"{WRITTEN}, forward")
    after(SlideRuntime, "leave_forward", lambda it, unit: f"{HEAD}, forward" if unit is it.blocks[-1] else BETWEEN)
    after(SlideRuntime, "end_forward", lambda *_: SCRIPT)
    after(SlideRuntime, "begin_backward", lambda *_: f"{HEAD}, backward")
    after(SlideRuntime, "enter_backward", lambda *_: f"{WRITTEN}, backward")
    after(
        SlideRuntime, "leave_backward", lambda it, unit: f"{EMBEDDING}, backward" if unit is it.blocks[0] else BETWEEN
    )
    after(SlideRuntime, "end_backward", lambda *_: SCRIPT)


# ---- the trace -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """`start`, `end`: microseconds."""

    start: float
    end: float
    name: str = ""


class Causes:
    """What the host did, as one list of times: the threads that compute wait for each other."""

    def __init__(self, whole: Span, ranges: Iterable[Span], marks: Iterable[Span]) -> None:
        """`ranges`: nested. `marks`: their names hold from their start on, where there is no range."""
        begins = [(each.start, 2, -each.end, each.name) for each in ranges]
        ends = [(each.end, 0, 0.0, "") for each in ranges]
        changes = [(each.start, 1, 0.0, each.name) for each in marks]
        self.starts, self.names = [whole.start], [SCRIPT]
        self._end = whole.end
        latest, within = SCRIPT, []
        for at, kind, _, name in sorted(begins + ends + changes):
            if kind == 2:
                within.append(name)
            elif kind == 0:
                within.pop()
            else:
                latest = name
            self.starts.append(min(max(at, whole.start), whole.end))
            self.names.append(within[-1] if within else latest)

    def at(self, moment: float) -> str:
        return self.names[max(0, bisect.bisect_right(self.starts, moment) - 1)]

    def between(self, start: float, end: float) -> Iterator[tuple[str, float]]:
        """Yield causes with their microseconds."""
        place = max(0, bisect.bisect_right(self.starts, start) - 1)
        for number in range(place, len(self.starts)):
            until = self.starts[number + 1] if number + 1 < len(self.starts) else self._end
            if (length := min(until, end) - max(start, self.starts[number])) > 0:
                yield self.names[number], length
            if until >= end:
                return


@dataclass
class Row:
    """Microseconds of all steps. `count`: kernels."""

    host: float = 0.0
    kernels: float = 0.0
    idle: float = 0.0
    count: int = 0


def rows_of(events: Sequence[dict[str, Any]]) -> dict[str, Row]:
    """Return the rows by cause, from the events of a trace (the format of Chrome)."""
    complete = [each for each in events if each.get("ph") == "X"]
    named = [
        Span(each["ts"], each["ts"] + each["dur"], each["name"])
        for each in complete
        if each.get("cat") == "user_annotation" and each["dur"] > 0
    ]
    (whole,) = [each for each in named if each.name == WHOLE]
    ranges = [replace(each, name=each.name.removeprefix(RANGE)) for each in named if each.name.startswith(RANGE)]
    marks = [replace(each, name=each.name.removeprefix(FROM_HERE)) for each in named if each.name.startswith(FROM_HERE)]
    causes, rows = Causes(whole, ranges, marks), defaultdict[str, Row](Row)
    for name, length in causes.between(whole.start, whole.end):
        rows[name].host += length
    # A graph's kernels have the correlation of its launch.
    launches = {
        each["args"]["correlation"]: each["ts"]
        for each in complete
        if each.get("cat") in CALLS and "correlation" in each.get("args", {})
    }
    busy_until, aside = whole.start, _streams_of_collectives(complete)
    for each in sorted((each for each in complete if _computes(each, aside)), key=lambda each: each["ts"]):
        launch, start, end = launches.get(each["args"].get("correlation")), each["ts"], each["ts"] + each["dur"]
        row = rows[UNKNOWN if launch is None else causes.at(launch)]
        row.kernels += each["dur"]
        row.count += 1
        if start > busy_until:
            launched = busy_until if launch is None else min(max(launch, busy_until), start)
            for name, length in causes.between(busy_until, launched):
                rows[name].idle += length
            rows[AHEAD].idle += start - launched
        busy_until = max(busy_until, end)
    return dict(rows)


def _computes(event: dict[str, Any], aside: set[Any]) -> bool:
    is_kernel = event.get("cat") in KERNELS and not any(way in event["name"] for way in ("HtoD", "DtoH"))
    return is_kernel and event["args"].get("stream") not in aside


def _streams_of_collectives(complete: Sequence[dict[str, Any]]) -> set[Any]:
    return {
        each["args"]["stream"]
        for each in complete
        if each.get("cat") in KERNELS and "nccl" in each["name"].lower() and "stream" in each["args"]
    }


@dataclass
class Collectives:
    """Kernels of one name, in microseconds of all steps. `beside`: while a kernel of the computation ran."""

    count: int = 0
    total: float = 0.0
    beside: float = 0.0


def collectives_of(events: Sequence[dict[str, Any]]) -> dict[str, Collectives]:
    """Return the kernels on the streams of collectives by name, from the events of a trace."""
    complete = [each for each in events if each.get("ph") == "X"]
    aside, found = _streams_of_collectives(complete), defaultdict[str, Collectives](Collectives)
    busy = _joined(Span(each["ts"], each["ts"] + each["dur"]) for each in complete if _computes(each, aside))
    starts = [each.start for each in busy]
    for each in complete:
        if each.get("cat") in KERNELS and each["args"].get("stream") in aside:
            start, end = each["ts"], each["ts"] + each["dur"]
            row = found[each["name"].split("(")[0].split("<")[0]]
            row.count += 1
            row.total += end - start
            for span in busy[max(0, bisect.bisect_right(starts, start) - 1) : bisect.bisect_left(starts, end)]:
                row.beside += max(0.0, min(span.end, end) - max(span.start, start))
    return dict(found)


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Return the times that the spans cover, in order."""
    joined: list[Span] = []
    for each in sorted(spans, key=lambda each: each.start):
        if joined and each.start <= joined[-1].end:
            joined[-1] = replace(joined[-1], end=max(joined[-1].end, each.end))
        else:
            joined.append(each)
    return joined


def table_of_collectives(rows: dict[str, Collectives], steps: int) -> str:
    lines = ["| ms a step | kernels | beside the computation | number |", "| --- | --- | --- | --- |"]
    for name, row in sorted(rows.items(), key=lambda each: -each[1].total):
        lines.append(
            f"| {name} | {row.total / steps / 1e3:.2f} | {row.beside / steps / 1e3:.2f} | {row.count // steps} |"
        )
    return "\n".join(lines)


def table(rows: dict[str, Row], steps: int) -> str:
    lines = ["| ms a step | host | kernels | idle | number of kernels |", "| --- | --- | --- | --- | --- |"]
    total = Row(*(sum(values) for values in zip(*map(astuple, rows.values()), strict=True)))
    ordered = sorted(rows.items(), key=lambda each: -max(each[1].host, each[1].kernels + each[1].idle))
    for name, row in [*ordered, ("**all**", total)]:
        times = " | ".join(f"{each / steps / 1e3:.2f}" for each in (row.host, row.kernels, row.idle))
        lines.append(f"| {name} | {times} | {row.count // steps} |")
    return "\n".join(lines)


def table_of_operators(calls: Iterable[Any], steps: int, most: int = 25) -> str:
    """Return the operators and calls of the driver that take the host most, without what they call themselves.
    `calls`: of `profile.key_averages`."""
    lines = ["| ms a step | host | number |", "| --- | --- | --- |"]
    for each in sorted(calls, key=lambda each: -float(each.self_cpu_time_total))[:most]:
        name = each.key.replace("|", "/")[:80]
        lines.append(f"| {name} | {each.self_cpu_time_total / steps / 1e3:.2f} | {each.count // steps} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    settings.add_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    parser.add_argument("--operators", action="store_true", help="a table of operators and driver calls, too")
    arguments = parser.parse_args()
    local_rank, operators = arguments.__dict__.pop("local_rank"), arguments.__dict__.pop("operators")
    setting = settings.from_arguments(arguments)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        step.begin_rank(local_rank)
    if setting.system == "slide":
        name_causes()
    with step.folder_on_disk(setting) as folder:
        measure(setting, folder, local_rank, ranks, operators=operators)


def measure(setting: settings.Setting, folder: str, local_rank: int, ranks: int, *, operators: bool = False) -> None:
    """Warm up, profile, and print the tables. `folder`: from `folder_on_disk`."""
    trainer, run, log = step.warmed_up(setting, folder)
    on_gpu = step.accelerator_device().type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    if local_rank:
        run(STEPS)
        trainer.close()
        return
    with profile(activities=kinds) as profiler, record_function(WHOLE):
        run(STEPS)
    with tempfile.TemporaryDirectory() as traces:
        path = Path(traces) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    steady = statistics.median(log.step_s[setting.warmup // 2 : setting.warmup])
    print(f"{setting.command()}\n{steady:.3f} s a step before the profiler\n{table(rows_of(events), STEPS)}")
    if operators:
        print(f"\n{table_of_operators(profiler.key_averages(), STEPS)}")
    if ranks > 1:
        print(f"\n{table_of_collectives(collectives_of(events), STEPS)}")
    print(json.dumps(trainer.stats().get("activations", {})))
    trainer.close()


if __name__ == "__main__":
    main()
