"""In which order the update lane takes its tasks."""

from __future__ import annotations

from markers import Passing

from ds_slide.report.statistics import LaneMeter
from ds_slide.runtime.device import PASSED, Device
from ds_slide.runtime.transfers.handoff import Failures
from ds_slide.runtime.transfers.stream_worker import Delay
from ds_slide.runtime.updates.update_worker import UpdateWorker


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
