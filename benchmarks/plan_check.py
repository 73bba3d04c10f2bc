"""Compare what `ds-slide plan` says with what steps took: of records, or of steps that are run now.

    python3 benchmarks/plan_check.py [RECORDS ...] [--out PAGE.md]      # of step.py: files, or COMMIT:PATH of git
    python3 benchmarks/plan_check.py --run [--only REGEX] [--nvme-path DIR] --records NEW.jsonl [--out PAGE.md]

A record is planned from its own DeepSpeed JSON, with the ceilings of its run where the file holds them, and those of
`--ceilings` otherwise. `--run` measures the ceilings of this machine first, as `ds-slide doctor` does. Errors are
predicted over measured, less one.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from settings import Setting
from shapes import finetune_models

from ds_slide.cli.planning.model import ModelShape, read_adapter
from ds_slide.cli.planning.planner import Planner, Request
from ds_slide.config.old_names import MOVED
from ds_slide.config.schema import CONFIG_KEY
from ds_slide.plan.allocations import BLOCK_RING
from ds_slide.plan.ceilings import Ceilings, DiskCeilings, read_ceilings
from ds_slide.plan.forecast import CONTEXT_BYTES, Forecast, Room
from ds_slide.runtime.core.settings import LEAST_RING

HERE = Path(__file__).resolve().parent
AT_C155 = "c15576420a86:benchmarks/results/"
RECORDS = (
    "benchmarks/results/2026-11-23_nvidia-h200-x2_passes.jsonl",
    "benchmarks/results/2026-11-23_nvidia-h200_choosing.jsonl",
    "benchmarks/results/2026-11-23_nvidia-h200_hand-sweep.jsonl",
    "benchmarks/results/2026-11-24_nvidia-h200_hand-sweep.jsonl",
    *(
        f"{AT_C155}{name}.jsonl"
        for name in (
            "2026-11-21_nvidia-h200_kernels_step",
            "2026-11-21_nvidia-h200_streamed-head",
            "2026-11-22_nvidia-h200_before-after",
            "2026-11-21_nvidia-h200_ssd-1.5b_huge-pages",
            "2026-11-21_nvidia-h200_ssd-3b_on-states",
            "2026-11-21_nvidia-h200_ssd-ga_auto-window",
            "2026-11-21_nvidia-h200_ssd-large",
        )
    ),
)
"""Those that the committed page is made from."""
H200_BYTES = int(139.8 * 2**30)


def ceilings_of_this_machine(*paths: str) -> Ceilings:
    """As `ds-slide doctor` has them, of disks at `paths` as well."""
    command = (sys.executable, str(HERE / "ceilings.py"), *paths)
    measured = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Ceilings.model_validate_json(measured.splitlines()[-1])


def share_of_gpu(gib: float, gpu_bytes: int) -> float:
    """1 of a GPU that has less."""
    return round(min(1.0, gib * 2**30 / gpu_bytes), 4)


def checks(nvme_path: str, host_bytes: int, gpu_bytes: int | None) -> Iterator[Setting]:
    """What `--run` runs: 0.5 to 14 G parameters, three caps of the GPU, SSD, accumulation, short and long sequences.
    What does not fit this machine is refused, which is no row. Without a GPU a small model, to see that all of it
    works."""
    if gpu_bytes is None:
        yield Setting("slide", "tiny", batch=2, seq=128, steps=3, warmup=2)
        return
    # Decisions are made after steps 3 and 6, and step 7 makes the room.
    decided: dict[str, Any] = {"steps": 5, "warmup": 9, "checkpointing": "reentrant"}
    short: dict[str, Any] = {**decided, "steps": 20}  # steps that the host makes longer by a tenth now and then
    large, small, smaller = (share_of_gpu(gib, gpu_bytes) for gib in (80, 24, 12))
    # The system ends a run that takes all of the memory beside the process that waits for the next one.
    states = f"{int(0.8 * host_bytes / 2**30)}GiB"
    yield Setting("slide", "qwen2.5-14b", batch=4, slide={"host_memory": states}, **decided)
    yield Setting("slide", "qwen2.5-7b", **decided)
    yield Setting("slide", "qwen2.5-0.5b", **short)
    yield Setting("slide", "qwen2.5-0.5b", seq=512, grad_accum=4, **short)
    yield Setting("slide", "qwen2.5-1.5b", clip=0.0, **short)
    yield Setting("slide", "qwen2.5-1.5b", gpu_fraction=small, **decided)
    if nvme_path:
        on_ssd: dict[str, Any] = {"offload": "nvme", "nvme_path": nvme_path}
        little: dict[str, Any] = {"gpu_fraction": smaller, "slide": {"host_memory": "2GB"}}
        yield Setting("slide", "qwen2.5-0.5b", **little, **on_ssd, **short)
    yield Setting("slide", "qwen2.5-3b", gpu_fraction=large, **decided)
    yield Setting("slide", "qwen2.5-3b", batch=32, seq=512, **decided)
    yield Setting("slide", "qwen2.5-3b", batch=1, seq=32_768, **decided)
    yield Setting("slide", "qwen2.5-3b", batch=4, grad_accum=4, gpu_fraction=large, **decided)
    yield Setting("slide", "qwen2.5-3b", clip=0.0, **decided)
    yield Setting("slide", "qwen2.5-3b", gpu_fraction=small, **decided)
    yield Setting("slide", "qwen2.5-3b", batch=4, gpu_fraction=smaller, **decided)
    yield Setting("slide", "qwen2.5-7b", batch=4, gpu_fraction=small, **decided)
    if nvme_path:
        yield Setting("slide", "qwen2.5-1.5b", slide={"gpu_states": 0, "host_memory": 0}, steps=2, warmup=2, **on_ssd)


@dataclass(frozen=True)
class Compared:
    """One record beside its forecast; bytes and seconds. `decided`: units that have moved to the GPU, and blocks whose
    activations were kept, as measured and as predicted; None of an engine that decided nothing."""

    what: str
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    decided: tuple[str, str] | None = None

    def error(self, figure: str) -> float | None:
        if not self.measured.get(figure):
            return None
        return self.predicted[figure] / self.measured[figure] - 1


FIGURES = {"step": ("s", 1.0), "GPU peak": ("GB", 1e9), "host peak": ("GB", 1e9)}
LANES = {"compute": ("s", 1.0), "update": ("s", 1.0)}
"""Busy times, of the last step."""
OWN_DISK = {"last step": ("s", 1.0), "read and written": ("GB", 1e9)}
"""With the rate that the disk had in the last step: what is left is the forecast's own error."""


def lines_of(source: str) -> list[dict[str, Any]]:
    """The records of a file, or of `COMMIT:PATH`."""
    if Path(source).exists():
        text = Path(source).read_text(encoding="utf-8")
    else:
        text = subprocess.run(
            ("git", "show", source), cwd=HERE.parent, capture_output=True, text=True, check=True
        ).stdout
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def ceilings_of(records: Sequence[Mapping[str, Any]], otherwise: Ceilings) -> Ceilings:
    """With what the run has measured of its own machine: ceilings, or a flat record of the GPU, as runs had before."""
    own = next((record for record in records if record.get("gemm_tflop_s")), None)
    if own is None and (own := next((r["ceilings"] for r in records if r.get("ceilings")), None)) is not None:
        return Ceilings.model_validate(own) if "cpu" in own else _with_link(own, otherwise)
    return otherwise if own is None else _with_link(own, otherwise)


def with_ceilings(
    records: Sequence[Mapping[str, Any]], otherwise: Ceilings
) -> Iterator[tuple[Mapping[str, Any], Ceilings]]:
    """The records of steps, each with the ceilings that were measured last before it, or else in any of them."""
    found = ceilings_of(records, otherwise)
    for record in records:
        if record.get("ceilings"):
            found = ceilings_of([record], otherwise)
        if usable(record):
            yield record, found


def _with_link(own: Mapping[str, Any], otherwise: Ceilings) -> Ceilings:
    if otherwise.gpu is None or not own.get("gemm_tflop_s"):
        return otherwise
    gpu = otherwise.gpu.model_copy(
        update={
            "product_tflop_s": {"8192x8192x8192": own["gemm_tflop_s"]},
            "copy_gb_s": own["device_copy_gb_s"],
            "h2d_gb_s": own["h2d_gb_s"],
            "d2h_gb_s": own["d2h_gb_s"],
            "both_ways_gb_s": own["h2d_both_gb_s"],
        }
    )
    return otherwise.model_copy(update={"gpu": gpu})


def usable(record: Mapping[str, Any]) -> bool:
    setting = record.get("setting") or {}
    own_kernels = not setting.get("patch")
    return record.get("status") == "ok" and setting.get("system") == "slide" and own_kernels


def compare(planner: Planner, record: Mapping[str, Any], ceilings: Ceilings, room: Room) -> Compared:
    setting = Setting(**{key: value for key, value in record["setting"].items() if key in Setting.__dataclass_fields__})
    if record.get("ssd_gb_s"):
        ceilings = with_disk(ceilings, record["ssd_gb_s"])
    request = Request(
        shape=ModelShape(setting.model, shape_config(setting.model), adapter_of(setting)),
        raw=record["deepspeed_config"],
        batch=setting.batch,
        seq=setting.seq,
        room=room,
        ceilings=ceilings,
        checkpointing=setting.checkpointing != "none",
    )
    statistics_of_engine = record.get("slide_stats") or {}
    memory = statistics_of_engine.get("memory") or {}
    request = as_engine_of_then(request, setting, statistics_of_engine)
    decides = "activations" in statistics_of_engine
    plan = planner.steady if decides else planner.forecast
    forecast = plan(request)
    slots = memory.get("slots") or recorded_slots(forecast, memory)
    if slots and slots != forecast.plan.placement.window and "promoted_units" not in memory:
        # Of an engine whose window did not grow yet: with its own. Today's has decided how many slots it needs.
        request = request.with_block(window=max(2, slots))
        forecast = plan(request)
    what = f"{setting.model} {setting.batch} x {setting.seq}" + (f" x {setting.grad_accum}" * (setting.grad_accum > 1))
    adapter = [f"LoRA {setting.adapter}"] * bool(setting.adapter)
    settings = [*adapter, f"clipping {setting.clip:g}", *(f"{key} {value}" for key, value in setting.slide.items())]
    if setting.checkpointing == "none":
        settings.append("no checkpointing")
    if setting.gpu_fraction < 1:
        settings.append(f"GPU {setting.gpu_fraction:.1%}")
    speculates = (statistics_of_engine.get("speculation") or {}).get("blocks")
    time = forecast.below_limit if speculates else forecast.time
    predicted = {
        "step": time.step_s,
        "GPU peak": float(forecast.gpu_peak_allocated),
        "host peak": float(forecast.host_peak(time.schedule)),
        **{lane: time.lanes[lane] for lane in LANES},
    }
    lanes = statistics_of_engine.get("lanes") or {}
    other_logs = speculates and memory["undo_log_bytes"] != forecast.plan.undo_log_bytes
    measured = {
        # Undo logs are touched for the first time in many steps, which get shorter until they have been.
        "step": statistics_of_engine["step_s"] if speculates else record["step_s"],
        "GPU peak": record.get("gpu_peak_allocated_bytes"),
        "host peak": None if other_logs else record["host_peak_bytes"],
        **{lane: lanes[lane]["busy_s"] for lane in LANES if lane in lanes},
    }
    disk_lane = lanes.get("ssd") or {}
    if disk_lane.get("bytes"):
        with_rate = plan(replace(request, ceilings=with_disk(ceilings, disk_lane["bytes"] / disk_lane["busy_s"] / 1e9)))
        predicted["last step"] = with_rate.time.step_s
        predicted["read and written"] = with_rate.time.ssd_read + with_rate.time.ssd_written
        measured["last step"] = statistics_of_engine["step_s"]
        measured["read and written"] = disk_lane["bytes"]
    decided = None
    if decides:
        kept = statistics_of_engine["activations"]["keep"]
        promoted, blocks = len(forecast.plan.placement.promoted), len(forecast.activations.kept.whole)
        decided = f"{memory['promoted_units']}, {kept}", f"{promoted}, {blocks}"
    whole = f"{what}, {', '.join(settings)}{', SSD' * (setting.offload == 'nvme')}"
    return Compared(whole, predicted, measured, decided)


def with_disk(ceilings: Ceilings, rate: float) -> Ceilings:
    """With one disk of so many GB/s."""
    disk = DiskCeilings(path="", read_gb_s=rate, write_gb_s=rate, mixed_gb_s=rate, direct=True, backend="io_uring")
    return ceilings.model_copy(update={"disks": (disk,)})


def as_engine_of_then(request: Request, setting: Setting, stats: Mapping[str, Any]) -> Request:
    """Without what the engine of an older record had not: two passes, kernels by default, updates ahead,
    recomputation that the script does not ask for, blocks that are recomputed in part, more buffers for gradients."""
    block = request.raw[CONFIG_KEY]
    then = {key: block["debug"][key] for key in MOVED if key in block.get("debug", {})}
    if then:  # these are settings of their own now
        debug = {key: value for key, value in block["debug"].items() if key not in then}
        if then.pop("mix", True) is False:
            then["activations"] = "whole_blocks"
        request = request.with_block(debug=debug, **then)
    if "speculation" not in stats:
        request = request.with_block(speculate=False)
    if "spare_state_bytes" not in (stats.get("memory") or {}):
        request = request.with_block(debug={"out_of_place": False})
    if "mix" not in (stats.get("activations") or {}) and "activations" not in request.raw[CONFIG_KEY]:
        request = request.with_block(activations="whole_blocks")
    ring = (stats.get("pools") or {}).get(BLOCK_RING, {"buffers": LEAST_RING})
    request = request.with_block(gradient_buffers=ring["buffers"])
    if "update_passes" not in stats:
        request = request.with_block(update_passes=1)
    if "kernels" not in stats and "kernels" not in setting.slide:
        request = request.with_block(kernels="off")
    if setting.checkpointing == "none" and not (stats.get("activations") or {}).get("checkpointed"):
        request = request.with_block(activations="as_written")
    return request


def recorded_slots(forecast: Forecast, memory: Mapping[str, Any]) -> int | None:
    """Of a record that has the bytes of its window only."""
    slot = next((each.piece for each in forecast.plan.allocations if each.why == "the window" and each.count), 0)
    return memory["window_bytes"] // slot if slot and memory.get("window_bytes") else None


def shape_config(name: str) -> Any:
    """Of a preset or of a shape that only benchmarks have."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**finetune_models.PRESETS[name])


def adapter_of(setting: Setting) -> Any:
    return read_adapter(str(setting.adapter)) if setting.adapter else None


def run(settings: Sequence[Setting], records: Path, only: str, ceilings: Ceilings) -> None:
    """Run steps that are not in `records` yet, each in a process of its own, behind the ceilings of the machine, which
    may be another one than that of the records before. The process of the next ones imports what it needs while a run
    builds its model, which takes longer, and then waits."""
    lines = lines_of(str(records)) if records.exists() else []
    done = {json.dumps(record.get("setting")) for record in lines}
    own = {"ceilings": ceilings.model_dump(mode="json")}
    if own != next((record for record in reversed(lines) if "setting" not in record), None):
        with records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(own) + "\n")
    todo: list[Setting] = []
    for setting in settings:
        key = json.dumps(vars(setting.shown()))  # two caps are one on a GPU that has less
        if re.search(only, setting.command()) and key not in done:
            done.add(key)
            todo.append(setting)
    standby = None
    for number, setting in enumerate(todo):
        process = standby or on_standby(setting, records)
        print(setting.command(), file=sys.stderr, flush=True)
        process.stdin.write(b"\n")
        process.stdin.close()
        standby = on_standby(todo[number + 1], records) if number + 1 < len(todo) else None
        process.wait()


def on_standby(setting: Setting, records: Path) -> Any:
    """A process that runs the setting once a line is written to it, and ends where nothing is."""
    command = (sys.executable, str(HERE / "step.py"), *setting.arguments(), "--out", str(records), "--standby")
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def page(compared: Sequence[Compared], ceilings: str, sources: Sequence[str]) -> Iterator[str]:
    yield "# What `ds-slide plan` says beside what was measured"
    yield ""
    yield f"Ceilings: {ceilings}."
    yield "An error is predicted over measured, less one. GPU peak: what torch's allocator gave out."
    yield ""
    yield from table(compared, FIGURES)
    yield ""
    yield "Busy seconds of two lanes in the last step; what the host loses between kernels counts as compute:"
    yield ""
    yield from table(compared, LANES)
    yield ""
    beside_ssd = [each for each in compared if "last step" in each.measured]
    if beside_ssd:
        yield "Beside SSD, the last step with the rate that the disk had in it, which changes from step to step:"
        yield ""
        yield from table(beside_ssd, OWN_DISK)
        yield ""
    if any(each.decided for each in compared):
        yield "What the engine decided after its first steps: units moved to the GPU, checkpointed blocks kept."
        yield ""
        yield "| setting | measured | predicted |"
        yield "|---|---|---|"
        yield from (f"| {each.what} | {' | '.join(each.decided)} |" for each in compared if each.decided)
        yield ""
    for figure in (*FIGURES, *LANES, *OWN_DISK):
        errors = [error for each in compared if (error := each.error(figure)) is not None]
        if errors:
            middle, worst = statistics.median(map(abs, errors)), max(errors, key=abs)
            yield f"* {figure}: median error {middle:.1%}, worst {worst:+.1%} ({len(errors)} rows)"
    yield ""
    yield f"`{' '.join(('python3 benchmarks/plan_check.py', *sources))}`"


def table(compared: Sequence[Compared], figures: Mapping[str, tuple[str, float]]) -> Iterator[str]:
    heads = [text for figure, (unit, _) in figures.items() for text in (f"{figure} {unit}", "predicted", "error")]
    yield f"| setting | {' | '.join(heads)} |"
    yield "|---" * (1 + len(heads)) + "|"
    for each in compared:
        cells = [each.what]
        for figure, (_, scale) in figures.items():
            error = each.error(figure)
            known = "" if error is None else f"{each.measured[figure] / scale:.3f}"
            cells += [known, f"{each.predicted[figure] / scale:.3f}", "" if error is None else f"{error:+.1%}"]
        yield f"| {' | '.join(cells)} |"


def room_of(record: Mapping[str, Any], ceilings: Ceilings) -> Room:
    """For a record."""
    if ceilings.gpu is None or record.get("device") == "cpu":
        return Room(None, ceilings.cpu.memory_bytes, process_bytes=ceilings.process_of(on_gpu=False))
    whole, share = ceilings.gpu.memory_bytes, record["setting"].get("gpu_fraction", 1.0)
    limit, process = int(whole * share), ceilings.process_of(on_gpu=True)
    room = Room(whole, ceilings.cpu.memory_bytes, process_bytes=process)
    return replace(room, gpu=limit, context_bytes=0) if limit < whole - CONTEXT_BYTES else room


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", metavar="RECORDS", help="files of step.py, or COMMIT:PATH")
    parser.add_argument("--ceilings", default="h200-16-cores", help="of runs that have not measured their own")
    parser.add_argument("--run", action="store_true", help="run steps now, into --records")
    parser.add_argument("--records", type=Path, help="the file that --run writes")
    parser.add_argument("--only", default="", help="of --run: the settings whose command matches")
    parser.add_argument("--nvme-path", default="", help="of --run: a folder on the disk for states")
    parser.add_argument("--out", type=Path, help="the page")
    arguments = parser.parse_args()
    sources = list(arguments.sources or ([] if arguments.run else RECORDS))
    if arguments.run:
        if arguments.records is None:
            parser.error("--run needs --records")
        here = ceilings_of_this_machine(*filter(None, [arguments.nvme_path]))
        gpu_bytes = here.gpu.memory_bytes if here.gpu else None
        settings = list(checks(arguments.nvme_path, here.cpu.memory_bytes, gpu_bytes))
        run(settings, arguments.records, arguments.only, here)
        sources.append(str(arguments.records))
    planner, compared = Planner(), []
    otherwise = read_ceilings(arguments.ceilings)
    for source in sources:
        for record, ceilings in with_ceilings(lines_of(source), otherwise):
            compared.append(compare(planner, record, ceilings, room_of(record, ceilings)))
            print(compared[-1].what, file=sys.stderr, flush=True)
    text = "\n".join(page(compared, otherwise.source, arguments.sources)) + "\n"
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
