"""Reads the files that `ds_slide.report.chrome` writes: recorded steps, with times in seconds from each step's
begin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_slide.errors import SlideError
from ds_slide.report.chrome import FORMAT, WAIT
from ds_slide.report.host import BlockCost
from ds_slide.report.trace import REQUESTS


@dataclass(frozen=True)
class Work:
    """Work of one lane. It may begin before the step, and end after it."""

    lane: str
    what: str
    unit: str
    begin: float
    end: float


@dataclass(frozen=True)
class Waited:
    """A wait within the step; `ds_slide.report.trace.Wait` explains the fields."""

    row: str
    waiter: str
    what: str
    kept_by: str
    during: str
    of_script: bool
    begin: float
    end: float


@dataclass(frozen=True)
class RecordedStep:
    """One step of one rank. `begin_unix_s`: time of day. `bound_s`, `bound_lane`: from `slide_stats()`. `ssd_busy_s`:
    busy seconds of the disk, whose requests overlap. `units`: names in the engine's order. `lanes`: lanes that have
    worked or waited, in the order of the file. `host`: what blocks have cost the host."""

    rank: int
    number: int
    begin_unix_s: float
    seconds: float
    bound_s: float
    bound_lane: str
    ssd_busy_s: float
    units: list[str]
    lanes: list[str]
    work: list[Work]
    waits: list[Waited]
    host: list[BlockCost] = field(default_factory=list)


def read(path: Path) -> list[RecordedStep]:
    """Return the steps of one file, in order. Raises SlideError where no engine of this version has written it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SlideError(f"{path} cannot be read: {error}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SlideError(
            f'{path} is not JSON ({error}); name the file of "trace" in the "ds_slide" block, which is there when the '
            "last of its steps has ended"
        ) from error
    others = document.get("otherData") if isinstance(document, dict) else None
    written_as = others.get("ds_slide_trace") if isinstance(others, dict) else None
    if written_as != FORMAT:
        what = "is not a trace of DS-Slide" if written_as is None else f"has format {written_as}, not {FORMAT}"
        raise SlideError(f'{path} {what}; record one with "trace" in the "ds_slide" block of this version')
    try:
        if not (steps := list(_steps(document))):
            raise ValueError("its steps, of which there are none")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise SlideError(
            f"{path} is damaged: {type(error).__name__} at {error}; record it again, or get another copy of it"
        ) from error
    return steps


def _steps(document: dict[str, Any]) -> Iterator[RecordedStep]:
    others, events = document["otherData"], document["traceEvents"]
    to_unix_s = float(others["clock"]["to_unix_s"])
    rows = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    spans = {
        int(event["name"].removeprefix("step ")): (event["ts"] / 1e6, event["dur"] / 1e6)
        for event in events
        if event.get("cat") == "step"
    }
    # Work and waits have "args"; rows of waits are no lanes.
    detailed = [event for event in events if event["ph"] in ("X", "b") and "args" in event]
    work = [_work(event["args"], spans) for event in detailed if event["cat"] != WAIT]
    waits = [event["args"] for event in detailed if event["cat"] == WAIT]
    lanes = [row for row in rows[1:] if not any(wait["row"] == row for wait in waits)]
    for statistics, host in zip(others["slide_stats"], others["host"], strict=True):
        number = statistics["step"]
        begin, seconds = spans[number]
        if not seconds > 0.0:
            raise ValueError(f"step {number}, which has no duration")
        # Work that overlaps the step, in seconds from its begin.
        of_step = [
            Work(each.lane, each.what, each.unit, each.begin - begin, each.end - begin)
            for each in work
            if each.begin < begin + seconds and each.end > begin
        ]
        waited = sorted((_wait(wait) for wait in waits if wait["step"] == number), key=lambda wait: wait.begin)
        busy = {each.lane for each in of_step} | {wait.waiter for wait in waited}
        yield RecordedStep(
            rank=int(others["rank"]),
            number=number,
            begin_unix_s=begin + to_unix_s,
            seconds=seconds,
            bound_s=float(statistics["bound_s"]),
            bound_lane=str(statistics["bound_lane"]),
            ssd_busy_s=float(statistics["lanes"].get(REQUESTS, {"busy_s": 0.0})["busy_s"]),
            units=[str(unit) for unit in others["units"]],
            lanes=[lane for lane in lanes if lane in busy],
            work=of_step,
            waits=waited,
            host=[_cost(cost) for cost in host],
        )


def _work(details: dict[str, Any], spans: dict[int, tuple[float, float]]) -> Work:
    """Return work with the times of the file."""
    begin, _ = spans[details["step"]]
    lane, what, unit = (str(details[key]) for key in ("lane", "what", "unit"))
    return Work(lane, what, unit, begin + float(details["begin_s"]), begin + float(details["end_s"]))


def _cost(details: dict[str, Any]) -> BlockCost:
    seconds, own_s = float(details["seconds"]), float(details["own_s"])
    return BlockCost(str(details["unit"]), str(details["what"]), int(details["calls"]), seconds, own_s)


def _wait(details: dict[str, Any]) -> Waited:
    row, waiter, what, kept_by, during = (str(details[key]) for key in ("row", "waiter", "what", "kept_by", "during"))
    begin, end = float(details["begin_s"]), float(details["end_s"])
    return Waited(row, waiter, what, kept_by, during, bool(details["of_script"]), begin, end)
