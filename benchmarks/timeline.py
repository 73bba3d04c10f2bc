"""The timeline of one training step: record it for each system, then draw both as one SVG.

    python3 benchmarks/timeline.py record --system stock --model qwen2.5-3b --clip 1.0 --out stock.json
    python3 benchmarks/timeline.py record --system slide --model qwen2.5-3b --clip 1.0 --out slide.json
    python3 benchmarks/timeline.py draw stock.json slide.json --out docs/step-timeline.svg

DS-Slide's lanes come from its own record (`ds_slide.trace`). Stock's come from torch's profiler: kernels and copies of
the GPU, and the calls of its CPU optimizer, which are named for it here. Without a GPU (`DS_ACCELERATOR=cpu`) stock's
copies are part of what its one thread does, and show as its forward, backward and step. The profiler makes stock's
step longer by a few per cent, so the time that is written on its panel is that of the step before the recorded one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import machine
import settings
import timeline_picture
import torch
from settings import Setting
from step import accelerator_device, folder_on_disk, prepare_model, start, synchronize, token_batches, use_gpu
from timeline_picture import Bar, Panel
from torch.profiler import ProfilerActivity, profile, record_function
from trainers import Trainer, apply_patch

from ds_slide.report import chrome, drawing

STEP, UPDATE = "recorded step", "update"
PHASES = ("forward", "backward", "step")
# Kernels follow each other within microseconds: gaps that are shorter than this share of the step are no pauses.
SHORTEST_GAP = 1 / 2000
_COPIES = {"HtoD": ("h2d", "weights"), "DtoH": ("d2h", "gradient")}
_ROW_OF = {"h2d of outer modules": "h2d", "ssd": ""}


def run_step(trainer: Trainer, tokens: torch.Tensor, device: torch.device) -> float:
    """Seconds of one step, its phases named for the profiler."""
    synchronize(device)
    begin = time.perf_counter()
    with record_function(STEP):
        with record_function("forward"):
            loss = trainer.forward(tokens)
        with record_function("backward"):
            trainer.backward(loss)
        with record_function("step"):
            trainer.step()
        loss.item()
    synchronize(device)
    return time.perf_counter() - begin


def name_updates(trainer: Any) -> None:
    """Make the calls of stock's CPU optimizer, one for each sub-group, events of the profiler."""
    optimizer = trainer.engine.optimizer.optimizer
    call: Callable[..., Any] = optimizer.step

    def step(*arguments: Any, **named: Any) -> Any:
        with record_function(UPDATE):
            return call(*arguments, **named)

    optimizer.step = step


def record(setting: Setting) -> Panel:
    """Warm up, then record one step."""
    device = accelerator_device()
    with tempfile.TemporaryDirectory() as folder, folder_on_disk(setting) as on_disk:
        path = Path(folder) / "trace.json"
        is_slide = setting.system == "slide"
        if is_slide:
            number = setting.warmup + 2
            setting = replace(setting, slide={**setting.slide, "trace": {"path": str(path), "steps": [number, number]}})
        use_gpu(setting, device)
        model = prepare_model(setting, device)
        batches = token_batches(setting, model.config.vocab_size, device)
        apply_patch(model, setting.patch)
        trainer = start(model, setting, on_disk, device)
        if not is_slide:
            name_updates(trainer)
        times = [run_step(trainer, batches[n % len(batches)], device) for n in range(setting.warmup + 1)]
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with nullcontext() if is_slide else profile(activities=activities) as profiled:
            run_step(trainer, batches[0], device)
        if profiled is not None:
            profiled.export_chrome_trace(str(path))
        trainer.close()
        events = json.loads(path.read_text())["traceEvents"]
    bars = list(slide_bars(events) if is_slide else stock_bars(events))
    facts = machine.describe()
    return Panel(setting.system, times[-1], [asdict(bar) for bar in merged(bars)], facts, command())


def slide_bars(events: list[dict[str, Any]]) -> Iterator[Bar]:
    for event in events:
        if event["ph"] != "X" or "args" not in event or event["cat"] == chrome.WAIT:
            continue
        of = event["args"]
        if row := _ROW_OF.get(of["lane"], of["lane"]):
            what = of["what"] if of["what"] in timeline_picture.COLOURS else "other"
            yield Bar(row, what, of["begin_s"], of["end_s"])


def stock_bars(events: list[dict[str, Any]]) -> Iterator[Bar]:
    """Of a trace of torch's profiler, whose times are in microseconds."""
    spans = [event for event in events if event.get("ph") == "X"]
    step = next(event for event in spans if event["name"] == STEP and event["cat"] == "user_annotation")
    origin, end = step["ts"], step["ts"] + step["dur"]

    def bar(event: dict[str, Any], row: str, what: str) -> Bar:
        return Bar(row, what, (event["ts"] - origin) / 1e6, (event["ts"] + event["dur"] - origin) / 1e6)

    def named(category: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
        return [event for event in spans if event.get("cat") == category and event["name"] in names]

    updates = named("user_annotation", (UPDATE,))
    kernels = [event for event in spans if event.get("cat") == "kernel"]
    yield from (bar(event, "update", "update") for event in updates)
    if not kernels:
        for event in named("user_annotation", PHASES):
            what = {"step": "other"}.get(event["name"], event["name"])
            yield from without(bar(event, "compute", what), [bar(update, "", "") for update in updates])
        return
    # Kernels of backward carry no mark of the phase, because autograd submits them from a thread of its own; they are
    # those between forward's and the optimizer's.
    forward = named("gpu_user_annotation", ("forward",))[0]
    optimizer = named("user_annotation", ("step",))[0]
    for event in kernels:
        if origin <= event["ts"] < end:
            in_forward = forward["ts"] <= event["ts"] < forward["ts"] + forward["dur"]
            in_backward = forward["ts"] + forward["dur"] <= event["ts"] < optimizer["ts"]
            yield bar(event, "compute", "forward" if in_forward else "backward" if in_backward else "other")
    for event in spans:
        if event.get("cat") == "gpu_memcpy" and origin <= event["ts"] < end:
            yield from (bar(event, *row) for way, row in _COPIES.items() if way in event["name"])


def without(bar: Bar, holes: list[Bar]) -> Iterator[Bar]:
    begin = bar.begin
    for hole in sorted(holes, key=lambda hole: hole.begin):
        if hole.begin >= begin and hole.end <= bar.end:
            yield replace(bar, begin=begin, end=hole.begin)
            begin = hole.end
    yield replace(bar, begin=begin)


def merged(bars: list[Bar]) -> Iterator[Bar]:
    """Neighbours of one kind become one: a step of a GPU has ten thousand kernels."""
    gap = SHORTEST_GAP * max(bar.end for bar in bars)
    last: dict[str, Bar] = {}
    for bar in sorted(bars, key=lambda bar: bar.begin):
        before = last.get(bar.row)
        if before is not None and before.what == bar.what and bar.begin - before.end < gap:
            last[bar.row] = replace(before, end=max(before.end, bar.end))
        else:
            if before is not None:
                yield before
            last[bar.row] = bar
    yield from last.values()


def command() -> str:
    words = [word if number == 0 or sys.argv[number] != "--out" else "FILE" for number, word in enumerate(sys.argv[1:])]
    return "python3 benchmarks/timeline.py " + " ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="run one system and write what its lanes did in one step")
    settings.add_arguments(recording)
    recording.add_argument("--out", type=Path, required=True, help="JSON file")
    draw = actions.add_parser("draw", help="draw two records, one above the other")
    draw.add_argument("records", type=Path, nargs=2, help="stock's and DS-Slide's")
    draw.add_argument("--out", type=Path, required=True, help="SVG file")
    arguments = parser.parse_args()
    if arguments.action == "record":
        panel = record(settings.from_arguments(arguments))
        arguments.out.write_text(json.dumps(asdict(panel), indent=None) + "\n")
        print(f"{panel.system}: {panel.step_s:.3f} s, {len(panel.bars)} bars in {arguments.out}")
        return
    panels = [Panel(**json.loads(path.read_text())) for path in arguments.records]
    drawing.write(timeline_picture.picture(panels), arguments.out)


if __name__ == "__main__":
    main()
