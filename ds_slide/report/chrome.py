"""Recorded steps as a Chrome trace in JSON: Perfetto (ui.perfetto.dev) opens it, and `ds-slide trace` reads it.

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
from dataclasses import asdict
from typing import Any

from ds_slide.report.log import log
from ds_slide.report.trace import COMPUTE, REQUESTS, Clock, Event, Trace, Wait
from ds_slide.report.waits import Waits

FORMAT = 3
"""Version of the contents of `otherData` and `args`."""
WAIT = "wait"
"""The category of a wait. The category of work is its lane."""


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
    details = {
        "step": event.step,
        "lane": event.lane,
        "what": event.what,
        "unit": event.unit,
        "begin_s": event.begin,
        "end_s": event.end,
        "bytes": event.nbytes,
    }
    name = f"{event.what} {event.unit}".rstrip()
    common = {"name": name, "cat": event.lane, "pid": rank, "tid": rows.index(event.lane)}
    span = _span(begin + event.begin, begin + event.end)
    if event.lane != REQUESTS:
        yield {**common, **span, "args": details}
        return
    # Requests overlap, which rows of "X" cannot show.
    yield {**common, "ph": "b", "id": number, "ts": span["ts"], "args": details}
    yield {**common, "ph": "e", "id": number, "ts": _microseconds(begin + event.end)}


def _wait(wait: Wait, begin: float, rank: int, rows: Sequence[str]) -> dict[str, Any]:
    details = {
        "step": wait.step,
        "row": wait.row,
        "waiter": wait.waiter,
        "what": wait.what,
        "kept_by": wait.kept_by,
        "during": wait.during,
        "of_script": wait.of_script,
        "begin_s": wait.begin,
        "end_s": wait.end,
    }
    common = {"name": f"waits for {wait.what}", "cat": WAIT, "pid": rank, "tid": rows.index(wait.row)}
    return {**common, **_span(begin + wait.begin, begin + wait.end), "args": details}


def _span(begin: float, end: float) -> dict[str, Any]:
    # The end is rounded, not the duration: the next event must begin exactly there, or viewers would nest it.
    start = _microseconds(begin)
    return {"ph": "X", "ts": start, "dur": round(_microseconds(end) - start, 3)}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
