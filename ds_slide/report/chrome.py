"""Recorded steps as a Chrome trace in JSON, written and read: Perfetto (ui.perfetto.dev) opens it, and so does
`ds-slide trace`.

`ts` counts microseconds of the host's monotonic clock. All processes of a machine share it, so the files of its ranks
fit together unchanged. `otherData.clock.to_unix_s` plus its seconds is the time of day. It compares machines as well as
their clocks agree.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ds_slide.errors import SlideError
from ds_slide.report.host import BlockCost
from ds_slide.report.log import log
from ds_slide.report.trace import COMPUTE, REQUESTS, Clock, Event, Trace, Wait
from ds_slide.report.waits import Waits

FORMAT = 3
"""Version of the contents of `otherData` and `args`."""
WAIT = "wait"
"""The category of a wait. The category of work is its lane."""
_KEYS = {"begin": "begin_s", "end": "end_s", "nbytes": "bytes"}
"""Keys of the file that differ from the fields of `Event` and `Wait`."""
_TYPES = {"str": str, "int": int, "float": float, "bool": bool}

Record = TypeVar("Record", Event, Wait, BlockCost)


def write(trace: Trace, clock: Clock, host: Waits, *, rank: int) -> None:
    """Write the steps that have ended, and log it. A file that cannot be written does not end a training. `host` stops
    recording."""
    path = trace.request.path
    if not trace.statistics:
        host.take()
        log.warning(
            f"the trace {path} has not been written: the engine has ended before step {trace.request.first} had; "
            "name an earlier one in ds_slide.trace.steps"
        )
        return
    # Work of the last step may still be under way on the device: the script waits for it here.
    clock.marker.synchronize()
    trace.synchronize()
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(document(trace, clock, host, rank), file)
        os.replace(partial, path)
    except OSError as error:
        log.warning(f"the trace {path} has not been written: {error}; the training is not concerned")
        return
    log.info(
        f"the trace of {len(trace.statistics)} steps is in {path}: ds-slide trace {path} says what they waited for, "
        "ui.perfetto.dev shows them"
    )


def document(trace: Trace, clock: Clock, host: Waits, rank: int) -> dict[str, Any]:
    """Return the whole document. Events are sorted by time, and an event comes before the events inside it."""
    begins = {step: begin for step, begin, _ in trace.steps}
    work, waits = list(trace.events(clock)), list(trace.waits(clock, host))
    rows = _rows([*trace.lanes], {wait.row for wait in waits})
    events = [
        *_steps(trace, rank),
        *(each for number, event in enumerate(work) for each in _work(event, number, begins[event.step], rank, rows)),
        *(_wait(wait, begins[wait.step], rank, rows) for wait in waits),
    ]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "ds_slide_trace": FORMAT,
            "rank": rank,
            "units": list(trace.units),
            "clock": {
                "ts": "microseconds of CLOCK_MONOTONIC",
                "to_unix_s": time.time() - time.perf_counter(),
                "machine": socket.gethostname(),
            },
            "slide_stats": trace.statistics,
            "host": [
                [asdict(cost) for cost in of_step]
                for of_step, _ in zip(trace.host.steps, trace.statistics, strict=False)
            ],
        },
        "traceEvents": [*_names(rows, rank), *events],
    }


def _rows(lanes: Sequence[str], of_waits: set[str]) -> list[str]:
    """Return the rows from the top: each lane, and below it its waits. The script's threads are below the compute
    lane."""
    rows = ["step"]
    for lane in (COMPUTE, *lanes, REQUESTS):
        rows += [lane, *sorted(row for row in of_waits if row.startswith(f"{lane} waits"))]
        if lane == COMPUTE:
            known = tuple(f"{each} waits" for each in (COMPUTE, *lanes, REQUESTS))
            rows += sorted(row for row in of_waits if not row.startswith(known))
    return rows


def _names(rows: Sequence[str], rank: int) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"DS-Slide, rank {rank}"}}
    for number, name in enumerate(rows):
        common = {"ph": "M", "pid": rank, "tid": number}
        yield {"name": "thread_name", **common, "args": {"name": name}}
        yield {"name": "thread_sort_index", **common, "args": {"sort_index": number}}


def _steps(trace: Trace, rank: int) -> Iterator[dict[str, Any]]:
    for step, begin, end in trace.steps:
        yield {"name": f"step {step}", "cat": "step", "pid": rank, "tid": 0, **_span(begin, end)}


def _work(event: Event, number: int, begin: float, rank: int, rows: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of one event. `begin`: of the event's step, in seconds."""
    name = f"{event.what} {event.unit}".rstrip()
    common = {"name": name, "cat": event.lane, "pid": rank, "tid": rows.index(event.lane)}
    span = _span(begin + event.begin, begin + event.end)
    if event.lane != REQUESTS:
        yield {**common, **span, "args": _details(event)}
        return
    # Requests overlap, which rows of "X" cannot show.
    yield {**common, "ph": "b", "id": number, "ts": span["ts"], "args": _details(event)}
    yield {**common, "ph": "e", "id": number, "ts": _microseconds(begin + event.end)}


def _wait(wait: Wait, begin: float, rank: int, rows: Sequence[str]) -> dict[str, Any]:
    common = {"name": f"waits for {wait.what}", "cat": WAIT, "pid": rank, "tid": rows.index(wait.row)}
    return {**common, **_span(begin + wait.begin, begin + wait.end), "args": _details(wait)}


def _span(begin: float, end: float) -> dict[str, Any]:
    # The end is rounded, not the duration: the next event must begin exactly there, or viewers would nest it.
    start = _microseconds(begin)
    return {"ph": "X", "ts": start, "dur": round(_microseconds(end) - start, 3)}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# ----------------------------------------------------------------------------------------------------------------------
# Reading.


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
    work: list[Event]
    """Work that overlaps the step. It may begin before the step, and end after it."""
    waits: list[Wait]
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
        if not (steps := list(_read_steps(document))):
            raise ValueError("its steps, of which there are none")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise SlideError(
            f"{path} is damaged: {type(error).__name__} at {error}; record it again, or get another copy of it"
        ) from error
    return steps


def _read_steps(document: dict[str, Any]) -> Iterator[RecordedStep]:
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
    work = [_record(Event, event["args"]) for event in detailed if event["cat"] != WAIT]
    work = [_moved(each, spans[each.step][0]) for each in work]
    waits = [_record(Wait, event["args"]) for event in detailed if event["cat"] == WAIT]
    lanes = [row for row in rows[1:] if not any(wait.row == row for wait in waits)]
    for statistics, host in zip(others["slide_stats"], others["host"], strict=True):
        number = statistics["step"]
        begin, seconds = spans[number]
        if not seconds > 0.0:
            raise ValueError(f"step {number}, which has no duration")
        of_step = [_moved(each, -begin) for each in work if each.begin < begin + seconds and each.end > begin]
        waited = sorted((wait for wait in waits if wait.step == number), key=lambda wait: wait.begin)
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
            host=[_record(BlockCost, cost) for cost in host],
        )


def _moved(work: Event, seconds: float) -> Event:
    """Return the same work with its times counted from another moment."""
    return replace(work, begin=work.begin + seconds, end=work.end + seconds)


def _details(record: Event | Wait) -> dict[str, Any]:
    return {_KEYS.get(name, name): value for name, value in asdict(record).items()}


def _record(kind: type[Record], details: dict[str, Any]) -> Record:
    values = {each.name: details[_KEYS.get(each.name, each.name)] for each in fields(kind)}
    return kind(**{each.name: _TYPES[str(each.type)](values[each.name]) for each in fields(kind)})
