"""A record of steps on a device that is behind the host, as a GPU is: markers are passed later than they are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds_slide.report import chrome
from ds_slide.report.statistics import LaneMeter
from ds_slide.report.trace import BETWEEN, NO_RANGES, UNLABELLED, Clock, Event, LaneTrace, Trace, TraceRequest
from ds_slide.report.waits import Waits

HOST = 100.0
"""Seconds of the host's clock when the device's is at zero."""


class Point:
    """A marker at a device time, which has a time only when somebody has waited for it, or it is known as passed."""

    def __init__(self, at: float, *, passed: bool = False) -> None:
        self.at, self.passed = at, passed

    def synchronize(self) -> None:
        self.passed = True

    def seconds_until(self, later: Any) -> float:
        assert self.passed and later.passed, "the device is not ready"
        return later.at - self.at


def passed(at: float) -> Point:
    return Point(at, passed=True)


def recorded(path: Path) -> Trace:
    """Two steps of a second. The second forward is asked for in step 3 and runs in step 4."""
    trace = Trace(TraceRequest(path, 3, 4), ["block 0", "block 1"], ["h2d", "update"])
    trace.begin(HOST)
    compute = trace.compute
    compute.enter(("forward", 0), Point(0.2))
    compute.leave(("forward", 0), Point(0.6))
    compute.enter(("forward", 1), Point(1.1))
    compute.leave(("forward", 1), Point(1.5))
    trace.lanes["h2d"].add_interval(passed(-0.1), passed(0.3), 10, ("weights", 0))
    trace.stall.add_interval(passed(0.4), passed(0.5), 0, UNLABELLED)
    trace.lanes["update"].add_pause(HOST + 0.3, HOST + 0.4)
    trace.lanes["update"].add_span(HOST + 0.2, HOST + 0.6, 7, ("update", 1))
    for end, step in ((1.0, 3), (2.0, 4)):
        for lane in (*trace.lanes.values(), trace.stall, trace.requests):
            lane.cut()
        compute.cut()
        trace.end_step(HOST + end, {"step": step})
    return trace


def rounded(events: list[Event]) -> list[tuple[Any, ...]]:
    return [(e.step, e.lane, e.what, e.unit, round(e.begin, 6), round(e.end, 6), e.nbytes) for e in events]


def test_work_counts_where_the_device_does_it_and_less_its_waits(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "x.json")
    for of_step in trace.compute.steps:
        for point, _ in of_step:
            point.synchronize()
    assert rounded(list(trace.events(Clock(passed(0.0), HOST)))) == [
        (3, "h2d", "weights", "block 0", -0.1, 0.3, 10),
        (3, "update", "update", "block 1", 0.2, 0.3, 7),
        (3, "update", "update", "block 1", 0.4, 0.6, 0),
        (3, "compute", BETWEEN, "", 0.0, 0.2, 0),
        (3, "compute", "forward", "block 0", 0.2, 0.4, 0),
        (3, "compute", "forward", "block 0", 0.5, 0.6, 0),
        (3, "compute", BETWEEN, "", 0.6, 1.0, 0),
        (4, "compute", BETWEEN, "", 0.0, 0.1, 0),
        (4, "compute", "forward", "block 1", 0.1, 0.5, 0),
        (4, "compute", BETWEEN, "", 0.5, 1.0, 0),
    ]


def test_writing_waits_for_what_is_under_way(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    chrome.write(recorded(path), Clock(Point(0.0), HOST), Waits(NO_RANGES), rank=2)
    document = json.loads(path.read_text())
    assert document["otherData"]["slide_stats"] == [{"step": 3}, {"step": 4}]
    rows = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in rows} == {2} and min(event["ts"] for event in rows) == (HOST - 0.1) * 1e6
    assert not list(tmp_path.glob("*.partial"))


def test_a_recomputed_forward_lies_inside_of_its_backward() -> None:
    trace = Trace(TraceRequest(Path("x"), 2, 2), ["block 0"], [])
    compute = trace.compute
    compute.enter(("backward", 0), passed(0))
    compute.enter(("backward", 0), passed(1))  # announced again
    compute.enter(("forward", 0), passed(2))
    compute.leave(("forward", 0), passed(3))
    compute.leave(("backward", 0), passed(4))
    compute.leave(("backward", 0), passed(5))
    compute.cut()
    assert [(point.at, label[0]) for point, label in compute.steps[0]] == [  # type: ignore[attr-defined]
        (0, "backward"),
        (2, "forward"),
        (3, "backward"),
        (4, ""),
    ]


def test_ranks_have_files_of_their_own() -> None:
    request = TraceRequest(Path("/there/step.json"), 2, 3)
    assert request.of_rank(0, 1) is request
    assert request.of_rank(1, 2).path == Path("/there/step.rank1.json")


def test_a_lane_without_work_has_an_empty_step() -> None:
    lane = LaneTrace()
    lane.cut()
    assert lane.steps == [[]]


def test_what_the_device_is_behind_with_belongs_to_the_last_step() -> None:
    """Its copy has not ended when the step ends, and what it does for a step that never ends is in none."""
    meter, trace = LaneMeter(), Trace(TraceRequest(Path("x"), 2, 2), ["block 0"], ["h2d"])
    meter.set_trace(trace.lanes["h2d"])
    trace.begin(HOST)
    meter.add_interval(passed(0.8), Late(1.2), 10, ("weights", 0))
    meter.add_interval(passed(1.5), Late(1.6), 10, ("weights", 0))
    meter.take()
    trace.end_step(HOST + 1.0, {})
    trace.compute.cut()
    trace.requests.cut()
    trace.stall.cut()
    meter.end_trace()
    assert not meter.is_traced
    copies = [event for event in rounded(list(trace.events(Clock(passed(0.0), HOST)))) if event[1] == "h2d"]
    assert copies == [(2, "h2d", "weights", "block 0", 0.8, 1.2, 10)]


class Late(Point):
    """Passed when somebody has waited for it; then all before it are."""

    def done(self) -> bool:
        return self.passed
