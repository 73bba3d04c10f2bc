"""What is recorded of the waits of threads and streams while steps are traced, and what that costs."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ds_slide.report.statistics import LaneMeter
from ds_slide.report.trace import LaneTrace
from ds_slide.report.waits import HostWait, NoRanges, Waits
from ds_slide.runtime.core.device import PASSED, Device, Marker
from ds_slide.runtime.core.futures import THREAD_PREFIX, Failures, Future
from ds_slide.runtime.core.lanes import Delay, StreamWorker

SECONDS = 30.0


def waiting(failures: Failures, future: Future) -> threading.Thread:
    """A lane that waits for it, and has begun to."""
    thread = threading.Thread(target=future.wait, name=f"{THREAD_PREFIX}h2d", daemon=True)
    thread.start()
    pause = threading.Event()
    while not failures.waits():
        pause.wait(0.001)
    return thread


def test_a_wait_that_began_before_the_recording_counts_from_its_begin() -> None:
    waits = Waits(NoRanges())
    failures = Failures(waits)
    future = Future(failures, "the update of blocks.0")
    before = time.perf_counter()
    thread = waiting(failures, future)
    waits.is_recording = True
    future.complete()
    thread.join(SECONDS)
    (wait,) = waits.take()
    assert (wait.thread, wait.what) == ("ds_slide-h2d", "the update of blocks.0")
    assert before < wait.begin < wait.end < time.perf_counter()
    assert waits.keepers == {"the update of blocks.0": "MainThread"}


def test_a_wait_that_has_not_ended_counts_once() -> None:
    waits = Waits(NoRanges())
    failures = Failures(waits)
    waits.is_recording = True
    future = Future(failures, "it")
    thread = waiting(failures, future)
    (wait,) = waits.take()
    assert wait.what == "it" and wait.end <= time.perf_counter()
    future.complete()
    thread.join(SECONDS)
    assert not waits._ended


def test_one_that_is_ending_is_in_one_list_only() -> None:
    waits = Waits(NoRanges())
    waits.is_recording = True
    waits.end("a", "it", 1.0, None)
    (ended,) = waits._ended
    waits.under_way = lambda: [HostWait("a", "it", 1.0, 5.0), HostWait("b", "it", 1.0, 5.0)]
    assert waits.take() == [ended, HostWait("b", "it", 1.0, 5.0)]


def test_nothing_is_kept_while_no_step_is_recorded() -> None:
    waits = Waits(NoRanges())
    failures = Failures(waits)
    future = Future(failures, "it")
    thread = waiting(failures, future)
    future.complete()
    thread.join(SECONDS)
    assert not waits.keepers and not waits._ended


class Gpu(Device):
    """As a GPU to lanes: it notes on which stream it is asked to wait, and times markers by the host."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_cuda = True
        self.asked: list[tuple[str, Any]] = []

    def stream(self, *, first: bool = False) -> str:  # noqa: ARG002
        return "a stream"

    def on(self, stream: Any) -> Any:
        return Device(self.torch).on(stream)

    def enter_thread(self) -> None: ...

    def mark(self, stream: Any = None, *, timed: bool = False, host_waits: bool = False) -> Marker:  # noqa: ARG002
        self.asked.append(("timed" if timed else "untimed", stream))
        return Marker(at=time.perf_counter())

    def wait(self, marker: Marker, stream: Any = None) -> None:  # noqa: ARG002
        self.asked.append(("wait", stream))


def test_a_lane_names_what_its_stream_waits_for_while_steps_are_recorded() -> None:
    device, meter = Gpu(), LaneMeter()
    lane = StreamWorker("h2d", device, Failures(), meter, Delay(0.0, 0))
    try:
        lane.wait(PASSED, "a slot")
        assert device.asked == [("wait", "a stream")]
        trace = LaneTrace()
        meter.set_trace(trace)
        lane.wait(PASSED, "a slot")
        assert device.asked[1:] == [("timed", "a stream"), ("wait", "a stream"), ("timed", "a stream")]
        (wait,) = trace.stream_waits
        assert wait.label == ("a slot", -1) and isinstance(wait.end, Marker)
    finally:
        lane.close()


A_HUNDREDTH = 600
"""Calls of an empty function in a hundredth of the shortest block: forward and backward of 15 M parameters over 16,000
tokens, at 500 TFLOP/s, take 3 ms, and such a call 50 ns. In calls, because a core that others share has half of its
speed."""
A_BLOCK = {"spans": 6, "waits": 6, "futures": 8}
"""At most, of a block in a step: two passes through compute, two copies up, one down, an update; what each of them
waits for, and is waited for by."""


def test_recording_takes_less_than_a_hundredth_of_a_block() -> None:
    """By the cost of each call, in time of this thread: a comparison of whole steps would measure the machine."""

    def once(call: Callable[[], object]) -> float:
        begin = time.thread_time()
        for _ in range(1000):
            call()
        return (time.thread_time() - begin) / 1000

    def recording(is_on: bool) -> list[Callable[[], object]]:
        waits, meter = Waits(NoRanges()), LaneMeter()
        failures = Failures(waits)
        waits.is_recording = is_on
        if is_on:
            meter.set_trace(LaneTrace())

        def wait() -> None:
            with failures.waiting("it"):
                pass

        return [lambda: meter.add_span(1.0, 2.0), wait, Future(failures, "it").complete]

    # In turn, and compared within a turn: the speed of a core that others share changes from one moment to the next.
    # With the least of each over all turns, a block took 675 calls once in a suite, and 290 to 366 alone.
    calls = [lambda: None, *recording(True), *recording(False)]
    in_calls = []
    for _ in range(41):
        nothing, *seconds = (once(call) for call in calls)
        more = [on - off for on, off in zip(seconds[:3], seconds[3:], strict=True)]
        in_calls.append(sum(count * each for count, each in zip(A_BLOCK.values(), more, strict=True)) / nothing)
    a_block = statistics.median(in_calls)
    print(f"a block {a_block:.0f} calls")
    assert 0 < a_block < A_HUNDREDTH
