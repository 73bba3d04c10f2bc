"""Lanes and futures: order, and what becomes of those who wait for a lane that has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ds_slide.errors import SlideError
from ds_slide.runtime.core.device import PASSED, Marker
from ds_slide.runtime.core.futures import Failures, Future
from ds_slide.runtime.core.lanes import Delay, UpdateWorker

FAILED = r"the (\w+) lane stopped with ZeroDivisionError: .*; the weights in memory are no longer consistent"
SECONDS = 30.0


class Arrival:
    """Stands where a CUDA event stands in a `Marker`: the test says when the transfer has arrived."""

    def __init__(self) -> None:
        self._passed = threading.Event()

    def arrive(self) -> None:
        self._passed.set()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        assert self._passed.wait(SECONDS)


class Log:
    """Tasks for an update lane that note their names; the first one holds the lane until `start`."""

    def __init__(self, lane: UpdateWorker) -> None:
        self.names: list[str] = []
        self._lane = lane
        self._begun, self._started = threading.Event(), threading.Event()
        lane.submit(99, PASSED, self._hold)
        assert self._begun.wait(SECONDS)

    def _hold(self) -> int:
        self._begun.set()
        assert self._started.wait(SECONDS)
        return 0

    def submit(self, deadline: int, name: str, ready: Marker = PASSED, then: Callable[[], None] = lambda: None) -> None:
        def run() -> int:
            self.names.append(name)
            then()
            return 0

        self._lane.submit(deadline, ready, run)

    def start(self) -> None:
        self._started.set()


def test_updates_run_by_deadline(updates: UpdateWorker) -> None:
    log = Log(updates)
    for deadline in (5, 2, 4, 0, 3, 1):  # backward finishes the last block first
        log.submit(deadline, str(deadline))
    log.start()
    updates.drain()
    assert log.names == ["0", "1", "2", "3", "4", "5"]


def test_updates_of_one_unit_keep_their_order(updates: UpdateWorker) -> None:
    log = Log(updates)
    for name in ("other", "first", "second", "third"):
        log.submit(1 if name == "other" else 0, name)
    log.start()
    updates.drain()
    assert log.names == ["first", "second", "third", "other"]


def test_updates_that_have_arrived_go_first(updates: UpdateWorker) -> None:
    log = Log(updates)
    late = Arrival()
    log.submit(7, "there", then=late.arrive)
    log.submit(6, "there, needed sooner")
    log.submit(0, "urgent, not there yet", ready=Marker(late))  # transfers arrive in the order of submission
    log.start()
    updates.drain()
    assert log.names == ["there, needed sooner", "there", "urgent, not there yet"]


def test_lane_runs_in_order_and_drains(make_worker: Any) -> None:
    lane, seen = make_worker("h2d"), []
    for number in range(100):
        lane.submit(lambda number=number: seen.append(number))
    lane.drain()
    assert seen == list(range(100))


def test_close_runs_what_is_queued_and_can_be_repeated(make_worker: Any, updates: UpdateWorker) -> None:
    lane, seen = make_worker("d2h"), []
    for number in range(20):
        lane.submit(lambda number=number: seen.append(number))
        updates.submit(number, PASSED, lambda number=number: seen.append(number) or 0)
    for closing in (lane, updates, lane, updates):
        closing.close()
    assert sorted(seen) == sorted([*range(20)] * 2)


@pytest.mark.parametrize("failing", ["d2h", "update"])
def test_an_exception_in_a_lane_is_everyones(
    make_worker: Any, updates: UpdateWorker, failures: Failures, failing: str
) -> None:
    """How each wait ends by it: test_handoff."""
    lane = make_worker("d2h") if failing == "d2h" else updates
    arguments = () if failing == "d2h" else (0, PASSED)
    lane.submit(*arguments, lambda: 1 // 0)
    for wait in (Future(failures).wait, lane.drain):
        with pytest.raises(SlideError, match=FAILED) as raised:
            wait()
        assert failing in str(raised.value)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_delays_repeat_with_their_seed() -> None:
    draws = [[delay._random.random() for _ in range(5)] for delay in (Delay(1.0, 3), Delay(1.0, 3), Delay(1.0, 4))]
    assert draws[0] == draws[1] != draws[2]
