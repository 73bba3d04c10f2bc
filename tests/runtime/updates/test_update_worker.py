"""In which order the update lane takes its tasks."""

from __future__ import annotations

import functools
import threading

from markers import Passing

from ds_slide.report.statistics import LaneMeter
from ds_slide.runtime.core.device import PASSED, Device
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.lanes import HOLDING, Delay, UpdateWorker


def test_what_has_begun_ahead_goes_on_while_gradients_are_on_their_way(device: Device, failures: Failures) -> None:
    """On a GPU one nearly always is: a block got one run for each gradient that arrived, and the lane was idle."""
    lane, on_its_way, order = UpdateWorker(device, failures, LaneMeter(), Delay(0.0, 0)), Passing(), []

    def ahead() -> int:
        order.append("ahead")
        if len(order) == 1:
            lane.submit(0, on_its_way, arrived, "gradient kept")
        if len(order) < 3:
            lane.submit(1, PASSED, ahead, "speculative update", "spare")
        else:
            on_its_way.passed = True
        return 0

    def arrived() -> int:
        order.append("arrived")
        return 0

    lane.submit(1, PASSED, ahead, "speculative update", "spare")
    lane.close()
    assert order == ["ahead", "ahead", "ahead", "arrived"]


def test_what_goes_to_gradients_that_wait_is_told_apart(device: Device, failures: Failures) -> None:
    """What shares out the GPU's memory takes the rest for the queue that the next forward waits for."""
    meter = LaneMeter()
    lane = UpdateWorker(device, failures, meter, Delay(0.0, 0))
    lane.submit(0, PASSED, lambda: 3, HOLDING)
    lane.drain()
    (busy, moved), holding = meter.take(), meter.taken_holding
    assert holding == busy > 0 and moved == 3
    lane.submit(0, PASSED, lambda: 5)
    lane.close()
    busy, moved = meter.take()
    assert busy > 0 and moved == 5 and meter.taken_holding == 0.0


def test_what_has_arrived_is_not_asked_for_again(device: Device, failures: Failures) -> None:
    """Each look is a query of the GPU: of n tasks there were n^2 / 2. They run in the order of their deadlines."""

    class Counted(Passing):
        looks = 0

        def done(self) -> bool:
            self.looks += 1
            return super().done()

    markers, order = [Counted() for _ in range(8)], []
    for marker in markers:
        marker.passed = True

    def run(deadline: int) -> int:
        order.append(deadline)
        return 0

    lane, begin = UpdateWorker(device, failures, LaneMeter(), Delay(0.0, 0)), threading.Event()
    lane.submit(0, PASSED, lambda: int(not begin.wait(60)))
    for number, marker in enumerate(markers):
        lane.submit(8 - number, marker, functools.partial(run, 8 - number))
    begin.set()
    lane.close()
    assert order == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [marker.looks for marker in markers] == [2] * 8  # by the choice, and before it runs
