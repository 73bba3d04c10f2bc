"""Times of blocks' forwards: by kind, per step, and what a mixture adds."""

from __future__ import annotations

from typing import Any

import pytest

from ds_slide.plan.spare import Shape
from ds_slide.runtime.activations import costs
from ds_slide.runtime.activations.costs import HOST_BOUND, STEP_TO_BLOCKS, WAIT_S, CallTimes
from ds_slide.runtime.core.device import Device, Marker

SHORT, LONG = Shape(64, 16), Shape(128, 32)
KIND = {0: "wide", 1: "wide", 2: "narrow"}


class AheadOfGpu(Marker):
    """A mark that the device has not come to yet."""

    def done(self) -> bool:
        return False


class Clock:
    """A device whose marks have the time that the test has come to, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0
        self.is_behind = False

    def mark(self, *, timed: bool) -> Marker:
        assert timed
        return (AheadOfGpu if self.is_behind else Marker)(at=self.now)

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def clock() -> Any:
    return Clock()


@pytest.fixture
def times(clock: Device) -> CallTimes:
    return CallTimes(clock, KIND)


def call(
    times: CallTimes, clock: Clock, order: int, seconds: float, shape: Shape = SHORT, *, is_mixed: bool = False
) -> None:
    times.enter(order)
    clock.now += seconds
    times.leave(order, shape, is_mixed=is_mixed)


def measured(times: CallTimes, clock: Clock, *calls: tuple[int, float, bool]) -> None:
    """A step of such calls."""
    times.begin()
    for order, seconds, is_mixed in calls:
        call(times, clock, order, seconds, is_mixed=is_mixed)
    times.take()


def test_nothing_is_marked_but_in_steps_that_are_timed(times: CallTimes, clock: Clock) -> None:
    clock.mark = None  # type: ignore[assignment]
    call(times, clock, 0, 1.0)
    assert times.seconds_of(0) == 0.0 and clock.waits == 0


def test_blocks_of_a_kind_have_one_time_of_all_their_calls(times: CallTimes, clock: Clock) -> None:
    calls = [(0, 1.0), (1, 3.0), (0, 2.0), (1, 2.0), (2, 0.5)]  # two micro-batches, and one block that ran once
    measured(times, clock, *((order, seconds, False) for order, seconds in calls))
    assert times.seconds_of(0) == times.seconds_of(1) == pytest.approx(2 * 2.0)
    assert times.seconds_of(2) == pytest.approx(0.5) and clock.waits == 1


def test_what_lies_before_the_weights_have_come_does_not_count(times: CallTimes, clock: Clock) -> None:
    times.begin()
    clock.now += 7.0
    call(times, clock, 2, 1.0)
    times.take()
    assert times.seconds_of(2) == pytest.approx(1.0)


def test_a_mixture_costs_what_its_calls_take_more_than_plain_ones(times: CallTimes, clock: Clock) -> None:
    measured(times, clock, (0, 1.0, False), (1, 1.0, False))
    assert times.mixing_seconds_of(0) == 0.0
    measured(times, clock, (0, 1.25, True), (1, 1.25, True))
    assert times.mixing_seconds_of(0) == times.mixing_seconds_of(1) == pytest.approx(0.25)
    assert times.seconds_of(0) == pytest.approx(1.0)  # what a recomputation takes, which no mode is open for


def test_a_call_in_front_of_a_wait_costs_nothing(times: CallTimes, clock: Clock) -> None:
    """The next block's weights come when they come; the host needs a little time between two blocks in any case."""
    measured(times, clock, (0, 1.0, False), (1, 1.0, False))
    for behind, cost in ((WAIT_S / 2, 0.5), (2 * WAIT_S, 0.25), (4.0, 0.25)):
        times.begin()
        for order, gap in ((0, behind), (1, WAIT_S / 2), (2, 0.0)):
            call(times, clock, order, 1.5, is_mixed=order < 2)
            clock.now += gap
        times.take()
        assert times.mixing_seconds_of(0) == pytest.approx(cost)


def test_the_wait_of_a_block_that_is_not_timed_counts_and_its_work_does_not(times: CallTimes, clock: Clock) -> None:
    measured(times, clock, (0, 1.0, False))
    for gap, cost in ((4.0, 0.0), (0.0, 0.5)):
        times.begin()
        call(times, clock, 0, 1.5, is_mixed=True)
        clock.now += gap
        times.enter(1)  # as one that is compiled, which no one takes over
        clock.now += 7.0
        times.take()
        assert times.mixing_seconds_of(0) == pytest.approx(cost)


def test_the_last_block_of_a_forward_has_nothing_to_hide_in(times: CallTimes, clock: Clock) -> None:
    measured(times, clock, (0, 1.0, False), (1, 1.0, False))
    times.begin()
    for _ in range(2):  # micro-batches
        call(times, clock, 1, 1.5, is_mixed=True)
        times.end_forward()
        clock.now += 100.0  # loss and backward
    times.take()
    assert times.mixing_seconds_of(1) == pytest.approx(2 * 0.5)


def test_calls_of_other_sizes_say_nothing_of_a_mixture(times: CallTimes, clock: Clock) -> None:
    measured(times, clock, (0, 1.0, False))
    times.begin()
    call(times, clock, 0, 4.0, LONG, is_mixed=True)
    times.take()
    assert times.mixing_seconds_of(0) == 0.0 and times.seconds_of(0) == pytest.approx(4.0)


def test_a_mixture_is_never_credited_with_noise(times: CallTimes, clock: Clock) -> None:
    measured(times, clock, (2, 1.0, False))
    measured(times, clock, (2, 0.9, True))
    assert times.mixing_seconds_of(2) == 0.0


@pytest.mark.parametrize(
    ("of_host", "of_gpu", "waits"),
    [
        ((3.0, 0.9, 0.9), (1.0, 1.0, 1.0), True),
        ((3.0, 0.7, 0.7), (1.0, 1.0, 1.0), False),
        ((HOST_BOUND, 3.0, 3.0), (1.0, 1.0, 1.0), True),
        ((1.0, 1.0, 1.0), (9.0, 9.0, 0.1), False),  # a small block beside large ones
        ((1.0, 1.0, 1.0), (0.1, 0.1, 3.0), True),
    ],
)
def test_blocks_wait_for_the_host_where_their_launches_take_as_long(
    times: CallTimes,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    of_host: tuple[float, ...],
    of_gpu: tuple[float, ...],
    waits: bool,
) -> None:
    host = iter([moment for order, part in enumerate(of_host) for moment in (float(order), order + part)])
    monkeypatch.setattr(costs.time, "perf_counter", lambda: next(host))
    assert not times.wait_for_host
    measured(times, clock, *((order, seconds, False) for order, seconds in enumerate(of_gpu)))
    assert times.wait_for_host == waits


@pytest.fixture
def slow_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch of a block takes the host a second."""
    seconds = iter(range(1000))
    monkeypatch.setattr(costs.time, "perf_counter", lambda: float(next(seconds)))


@pytest.mark.usefixtures("slow_launches")
def test_a_host_whose_queue_of_launches_is_full_waits_for_the_gpu(times: CallTimes, clock: Clock) -> None:
    """A launch then takes as long as what the GPU computes meanwhile."""
    calls = [(order, 1.0, False) for order in (0, 1, 2)]
    measured(times, clock, *calls)
    assert times.wait_for_host
    clock.is_behind = True
    measured(times, clock, *calls)
    assert not times.wait_for_host


@pytest.mark.usefixtures("slow_launches")
def test_mixed_calls_say_nothing_of_the_host(times: CallTimes, clock: Clock) -> None:
    """A mode of the dispatcher sees their operators."""
    measured(times, clock, (0, 9.0, False), (1, 9.0, False))
    on_gpu_s = times.on_gpu_s
    measured(times, clock, (0, 1.0, True), (1, 1.0, True))
    assert not times.wait_for_host and times.on_gpu_s == on_gpu_s
    measured(times, clock, (0, 1.0, True), (1, 9.0, False))
    assert not times.wait_for_host
    measured(times, clock, (0, 9.0, True), (1, 1.0, False))
    assert times.wait_for_host


def test_the_gpu_alone_takes_the_shortest_time_of_each_kind(times: CallTimes, clock: Clock) -> None:
    """Longer calls have waited for the host."""
    measured(times, clock, (0, 3.0, False), (1, 1.0, False), (2, 0.5, False), (2, 2.0, False))
    assert times.on_gpu_s == pytest.approx(STEP_TO_BLOCKS * 4 * (2 * 1.0 + 2 * 0.5))


def test_the_gpu_alone_computes_mixed_calls_too(times: CallTimes, clock: Clock) -> None:
    """They take it as long as plain calls of their kind and shape, and their own time where there are none."""
    measured(times, clock, (0, 1.0, False), (1, 1.5, True), (2, 0.5, True), (2, 0.7, True))
    assert times.on_gpu_s == pytest.approx(STEP_TO_BLOCKS * 4 * (2 * 1.0 + 2 * 0.5))
