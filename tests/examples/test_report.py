"""The closing text: medians without warm-up, lanes counted once a step, memory against stock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from finetune_report import StepRecord, bound_lanes, report, size

EXAMPLES = Path(__file__).parents[2] / "examples"


def record(step: int, *, step_s: float = 1.0, lane: str = "", slide_step: int | None = None) -> StepRecord:
    slide: dict[str, Any] = {}
    if lane:
        memory = {"gpu_bytes": 3 << 20, "host_bytes": 14_000_000, "parameters": 1_000_000}
        slide = {"step": slide_step or step, "bound_lane": lane, "efficiency": 0.9, "memory": memory}
    return StepRecord(step, 6.0 - step, 1.0, 1e-4, 100 / step_s, step_s, slide)


def test_stock_report_leaves_out_warm_up() -> None:
    slow_start = [record(step, step_s=60.0) for step in (1, 2, 3)]
    records = [*slow_start, record(4), record(5)]
    text = report(records, engine="stock DeepSpeed", parameters=1_000_000, world_size=1, gpu_peak_bytes=2 << 30)
    assert "stock DeepSpeed, 1,000,000 parameters" in text
    assert "5.0000 -> 1.0000" in text
    assert "100 tokens/s, 1.000 s a step" in text
    assert "2.00 GiB peak" in text
    assert "24.8 MiB" in text  # 26 B a parameter
    assert "bound by" not in text


def test_slide_report_sets_host_states_against_stock() -> None:
    records = [record(1, lane="update")]
    text = report(records, engine="DS-Slide", parameters=2_000_000, world_size=2, gpu_peak_bytes=None)
    assert text.startswith("DS-Slide, 2,000,000 parameters, 2 rank(s), 1 steps")
    assert "update in 1 of 1 steps" in text
    assert "14.0 B/parameter" in text and "needs 24.8 MiB" in text  # one of two ranks: a million parameters


def test_free_memory_that_is_used_for_speed_is_told_apart() -> None:
    used = record(1, lane="update")
    used.slide["memory"] |= {"host_bytes": 26_000_000, "spare_state_bytes": 11_000_000, "undo_log_bytes": 1_000_000}
    text = report([used], engine="DS-Slide", parameters=1_000_000, world_size=1, gpu_peak_bytes=None)
    assert "host states 13.4 MiB needed, 14.0 B/parameter; stock ZeRO-3 offload needs 24.8 MiB" in text
    assert "host spare  11.4 MiB of free memory used besides" in text


def test_statistics_that_lag_count_once() -> None:
    lagging = [
        record(1),
        record(2, lane="h2d", slide_step=1),
        record(3, lane="h2d", slide_step=1),
        record(4, lane="compute"),
    ]
    assert bound_lanes(lagging).startswith("h2d in 1 of 2 steps, compute in 1 of 2 steps")


def test_no_steps_is_said() -> None:
    assert "--steps" in report([], engine="DS-Slide", parameters=1, world_size=1, gpu_peak_bytes=None)


def test_sizes_are_in_binary_units() -> None:
    assert [size(value) for value in (12, 1536, 3 << 20, 5 << 30)] == ["12.0 B", "1.5 KiB", "3.0 MiB", "5.00 GiB"]


PEAK = """
import mmap, resource
from finetune_report import process_peak_bytes

before = process_peak_bytes()
block = bytearray(b"x" * (before + (64 << 20)))  # more than the peak, so the peak must move
assert process_peak_bytes() > before + (32 << 20)
with mmap.mmap(-1, 1 << 30):  # addresses without memory: resident is meant, not reserved
    assert process_peak_bytes() < resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + (64 << 20)
"""


def test_the_peak_is_of_resident_memory() -> None:
    """In a process of its own: that of other tests has had peaks of 10 GB, and the block above would be as large."""
    subprocess.run([sys.executable, "-c", PEAK], cwd=EXAMPLES, check=True)
