"""What `finetune.py` tells: a JSON line a step, a progress bar, and a short report at the end."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

# Host bytes per parameter of stock DeepSpeed ZeRO-3 CPU offload in bf16, measured on a model of 3.09 B parameters: fp32
# master, two moments, fp32 and bf16 gradient, bf16 weight, and what its pinned allocator rounds up.
STOCK_BYTES_PER_PARAMETER = 26
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as it goes to the log. `slide` is empty on stock DeepSpeed and until DS-Slide has figures."""

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens_per_s: float
    step_s: float
    slide: dict[str, Any] = field(default_factory=dict)
    eval_loss: float | None = None

    def as_json(self) -> str:
        fields = {**vars(self)}
        if self.eval_loss is None:
            del fields["eval_loss"]
        return json.dumps(fields)


class Progress:
    """Shows and logs steps on rank 0 and keeps them for the report; on other ranks it only keeps them."""

    def __init__(self, *, first_step: int, steps: int, log: Path | None, visible: bool) -> None:
        self.records: list[StepRecord] = []
        self._visible = visible
        self._stack = ExitStack()
        self._log: TextIO | None = None
        if visible and log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            # A resumed run continues the log of the run before it.
            self._log = self._stack.enter_context(log.open("a" if first_step else "w", encoding="utf-8"))
        # disable=None: no bar when the output is not a terminal; a plain line now and then takes its place.
        self._bar = self._stack.enter_context(
            tqdm(total=steps, initial=first_step, unit="step", disable=None if visible else True, dynamic_ncols=True)
        )
        self._line_every = max(1, (steps - first_step) // 10)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def add(self, record: StepRecord) -> None:
        self.records.append(record)
        if self._log is not None:
            self._log.write(record.as_json() + "\n")
            self._log.flush()
        lane = record.slide.get("bound_lane")
        figures = [f"loss {record.loss:.3f}", f"{record.tokens_per_s:,.0f} tok/s", *([f"{lane} bound"] if lane else [])]
        self._bar.set_postfix_str(", ".join(figures), refresh=False)
        self._bar.update()
        if self._visible and self._bar.disable and len(self.records) % self._line_every == 0:
            print(f"step {record.step}/{self._bar.total}  {'  '.join(figures)}", flush=True)


def process_peak_bytes() -> int:
    """Peak resident memory of this process.

    VmHWM, not getrusage: ru_maxrss survives exec, so a process that a large one started would report that one's peak.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line: peak memory can only be read on Linux")


def report(
    records: list[StepRecord],
    *,
    engine: str,
    parameters: int,
    world_size: int,
    gpu_peak_bytes: int | None,
    weight_bytes: int = 2,
) -> str:
    """The closing text of a run with `engine` (a name to show). `weight_bytes`: of one weight, as it is trained.

    Memory is that of one rank. `gpu_peak_bytes` is None on the CPU accelerator, where the "GPU" is host memory too.
    """
    if not records:
        return "no step was run: --steps is not above the step that was loaded"
    steady = records[WARM_UP_STEPS:] or records
    step_s = statistics.median(record.step_s for record in steady)
    tokens_per_s = statistics.median(record.tokens_per_s for record in steady)
    slide = records[-1].slide
    lines = [
        f"{engine}, {parameters:,} parameters, {world_size} rank(s), {len(records)} steps",
        f"  loss        {records[0].loss:.4f} -> {records[-1].loss:.4f}",
        f"  speed       {tokens_per_s:,.0f} tokens/s, {step_s:.3f} s a step (medians after warm-up)",
    ]
    if slide:
        lines.append(f"  bound by    {bound_lanes(steady)}")
    lines += [f"  {line}" for line in _memory_lines(slide, parameters // world_size, gpu_peak_bytes, weight_bytes)]
    return "\n".join(lines)


def bound_lanes(records: list[StepRecord]) -> str:
    """Which lane set the bound in how many steps, and the median of bound time over step time."""
    # The statistics may lag a step, so the first lines of a log can hold none or repeat one.
    by_step = {record.slide["step"]: record.slide for record in records if record.slide}
    lanes = Counter(stats["bound_lane"] for stats in by_step.values())
    efficiency = statistics.median(stats["efficiency"] for stats in by_step.values())
    shares = ", ".join(f"{lane} in {count} of {len(by_step)} steps" for lane, count in lanes.most_common())
    return f"{shares}; bound / step time {efficiency:.2f} (median)"


def _memory_lines(slide: dict[str, Any], parameters: int, gpu_peak_bytes: int | None, weight_bytes: int) -> list[str]:
    """Peak memory of each tier on one rank. In 16 bits also what stock ZeRO-3 offload needs for the states alone."""
    stock = STOCK_BYTES_PER_PARAMETER * parameters if weight_bytes == 2 else None
    memory = slide.get("memory", {})
    lines = []
    if gpu_peak_bytes is not None:
        lines.append(f"GPU         {size(gpu_peak_bytes)} peak")
    if memory:
        place = "the GPU:" if gpu_peak_bytes is not None else "what stands for the GPU here:"
        lines.append(f"window      {size(memory['gpu_bytes'])} on {place} slots, outer modules and states kept there")
        lines += _host_lines(memory, parameters, stock)
    elif stock is not None:
        lines.append(
            f"host states about {size(stock)} with offload (measured: {STOCK_BYTES_PER_PARAMETER} B/parameter)"
        )
    lines.append(f"process     {size(process_peak_bytes())} peak resident, libraries and data included")
    return lines


def _host_lines(memory: dict[str, int], parameters: int, stock: int | None) -> list[str]:
    """Host memory that the run needs, and free memory that it has used besides, for speed. `stock`: bytes of stock
    ZeRO-3 offload, where they are known."""
    spare = memory.get("spare_state_bytes", 0) + memory.get("undo_log_bytes", 0)
    needed = memory["host_bytes"] - spare
    lines = [f"host states {size(needed)} needed, {needed / parameters:.1f} B/parameter"]
    if stock is not None:
        measured = f"{STOCK_BYTES_PER_PARAMETER} B/parameter, measured"
        lines[0] += f"; stock ZeRO-3 offload needs {size(stock)} ({measured})"
    if spare:
        lines.append(f"host spare  {size(spare)} of free memory used besides, to update blocks during backward")
    return lines


def size(num_bytes: float) -> str:
    """Bytes as text in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
