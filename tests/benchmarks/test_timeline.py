"""The picture of a step: it is what the committed records make, and its bars are what the recorders saw."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import timeline
import timeline_picture
from timeline_picture import Bar, Panel

from ds_slide.report import drawing

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*_timeline-*.json"))


def panels() -> list[Panel]:
    by_system = {panel.system: panel for panel in (Panel(**json.loads(path.read_text())) for path in RECORDS)}
    return [by_system["stock"], by_system["slide"]]


def drawn_to(path: Path, recorded: list[Panel]) -> str:
    drawing.write(timeline_picture.picture(recorded), path)
    return path.read_text()


def test_the_committed_picture_is_drawn_from_the_committed_records(tmp_path: Path) -> None:
    assert (ROOT / "docs" / "step-timeline.svg").read_text() == drawn_to(tmp_path / "step.svg", panels())


def test_a_picture_without_a_gpu_says_so_and_claims_no_time(tmp_path: Path) -> None:
    without = [replace(panel, facts=panel.facts | {"GPU": "none"}) for panel in panels()]
    drawn = drawn_to(tmp_path / "without.svg", without)
    assert "WITHOUT a GPU" in drawn and "s a step" not in drawn
    drawn = drawn_to(tmp_path / "with.svg", [replace(panel, step_s=1.5) for panel in panels()])
    assert "1.50 s a step" in drawn and "WITHOUT" not in drawn


def event(name: str, category: str, begin: float, end: float) -> dict[str, Any]:
    """As torch's profiler writes them, in microseconds."""
    return {"ph": "X", "name": name, "cat": category, "ts": 1000 + begin * 1e6, "dur": (end - begin) * 1e6}


def test_bars_of_the_profiler_on_a_gpu() -> None:
    bars = timeline.stock_bars(
        [
            event(timeline.STEP, "user_annotation", 0, 10),
            event("forward", "gpu_user_annotation", 0, 4),
            event("step", "user_annotation", 8, 10),
            event("kernel a", "kernel", 0, 3),
            event("kernel b", "kernel", 3.001, 4),
            event("kernel c", "kernel", 5, 8),
            event("kernel d", "kernel", 9.5, 9.8),
            event("kernel of the next step", "kernel", 11, 12),
            event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 0, 1),
            event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 6, 7),
            event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 6, 7),
            event(timeline.UPDATE, "user_annotation", 8, 9),
        ]
    )
    found = sorted((bar.row, bar.what, round(bar.begin, 3), round(bar.end, 3)) for bar in timeline.merged(list(bars)))
    assert found == [
        ("compute", "backward", 5, 8),
        ("compute", "forward", 0, 4),  # two kernels with nothing worth showing between them
        ("compute", "other", 9.5, 9.8),
        ("d2h", "gradient", 6, 7),
        ("h2d", "weights", 0, 1),
        ("update", "update", 8, 9),
    ]


def test_without_a_gpu_updates_are_taken_out_of_the_phase_that_calls_them() -> None:
    bars = timeline.stock_bars(
        [
            event(timeline.STEP, "user_annotation", 0, 10),
            event("forward", "user_annotation", 0, 4),
            event("step", "user_annotation", 8, 10),
            event(timeline.UPDATE, "user_annotation", 8.5, 9),
        ]
    )
    rounded = {Bar(bar.row, bar.what, round(bar.begin, 3), round(bar.end, 3)) for bar in bars}
    assert rounded == {
        Bar("update", "update", 8.5, 9),
        Bar("compute", "forward", 0, 4),
        Bar("compute", "other", 8, 8.5),
        Bar("compute", "other", 9, 10),
    }
