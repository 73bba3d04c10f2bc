"""What was behind the waits of a step that is made up: seconds of ten."""

from __future__ import annotations

import pytest

from ds_slide.report.causes import causes, duration, lane_shares, largest_waits
from ds_slide.report.chrome import RecordedStep
from ds_slide.report.trace import Event, Wait

UNITS = ["outer", "layers.0", "layers.1", "layers.10"]


def wait(waiter: str, begin: float, end: float, what: str, kept_by: str = "", during: str = "") -> Wait:
    return Wait(3, f"{waiter} waits", waiter, what, kept_by, during, waiter == "MainThread", begin, end)


def work(lane: str, what: str, unit: str, begin: float, end: float) -> Event:
    return Event(3, lane, what, unit, begin, end, nbytes=0)


def step_of(work: list[Event], waits: list[Wait], seconds: float = 10.0, ssd_busy_s: float = 0.0) -> RecordedStep:
    """Of rank 0, bound by updates of nine seconds."""
    named = {each.lane for each in work} | {each.waiter for each in waits}
    lanes = [lane for lane in ("compute", "h2d", "d2h", "update", "ssd") if lane in named]
    return RecordedStep(0, 3, 1e9, seconds, 9.0, "update", ssd_busy_s, UNITS, lanes, work, waits)


FORWARD = [work("compute", "forward", f"layers.{number}", 2.0 * number, 2.0 * number + 1) for number in (0, 1)]
BACKWARD = [work("compute", "backward", f"layers.{number}", 7.0 - 2 * number, 8.0 - 2 * number) for number in (0, 1)]


def of_block(number: int, begin: float, end: float, during: str = "forward") -> Wait:
    return wait("compute", begin, end, f"the weights of layers.{number} in a slot of the window", "h2d", during)


def behind(step: RecordedStep) -> list[tuple[str, str, float, float]]:
    return [(each.waiter, each.what, each.begin, each.end) for each in causes(step)]


def test_a_wait_is_followed_through_the_lanes() -> None:
    """Half of the time the copy itself is behind it; before that its update, which came late, after its gradient."""
    step = step_of(
        [work("update", "update", "layers.0", 2.0, 3.0)],
        [
            of_block(0, 0.0, 6.0),
            wait("h2d", 0.0, 3.0, "the update of layers.0", "update"),
            wait("update", 0.5, 2.0, "the GPU, for a gradient on its way to its update"),
        ],
    )
    assert sorted(behind(step), key=lambda cause: cause[2]) == [
        ("compute", "the update of layers.0", 0.0, 0.5),
        ("compute", "the GPU, for a gradient on its way to its update", 0.5, 2.0),
        ("compute", "the update of layers.0", 2.0, 3.0),
        ("compute", "the weights of layers.0 in a slot of the window", 3.0, 6.0),
    ]


def test_an_update_without_its_states_waits_for_the_disk() -> None:
    """For its own states first; what is busy with others' comes next, and what the lane itself does is its own."""
    step = step_of(
        [
            work("ssd", "states read", "layers.1", 0.0, 2.0),
            work("ssd", "states read", "layers.10", 0.0, 3.0),
            work("ssd", "states written", "outer", 0.0, 3.5),
            work("update", "update", "layers.1", 4.0, 5.0),
        ],
        [of_block(1, 0.0, 5.0), wait("h2d", 0.0, 5.0, "the update of layers.1", "update")],
    )
    assert sorted(behind(step), key=lambda cause: cause[2]) == [
        ("compute", "the states of layers.1 from SSD", 0.0, 2.0),
        ("compute", "the states of layers.10 from SSD", 2.0, 3.0),
        ("compute", "the states of outer on their way to SSD", 3.0, 3.5),
        ("compute", "the update of layers.1", 3.5, 4.0),
        ("compute", "the update of layers.1", 4.0, 5.0),
    ]


def test_lanes_that_wait_for_each_other_end_the_search() -> None:
    step = step_of([], [of_block(0, 0, 1), wait("h2d", 0, 1, "it", "d2h"), wait("d2h", 0, 1, "that", "h2d")])
    assert behind(step) == [("compute", "that", 0, 1)]


def test_a_thread_that_stands_still_inside_of_a_stall_says_better_what_for() -> None:
    others = "the other ranks in collective 7 of rank 0: gathering the weights of layers.0"
    step = step_of([], [of_block(0, 1.0, 3.0), wait("MainThread", 2.0, 4.0, others)])
    found = sorted(behind(step), key=lambda cause: cause[2])
    assert found[0] == ("compute", "the weights of layers.0 in a slot of the window", 1.0, 2.0)
    assert found[1:] == [("compute", others, 2.0, 3.0), ("MainThread", others, 3.0, 4.0)]
    assert "the other ranks in gathering the weights of {unit}" in {wait.what for wait in largest_waits(step)}


def test_threads_of_the_engine_hold_nobody_up_by_themselves() -> None:
    assert behind(step_of([], [wait("checkpoint", 0.0, 9.0, "the states of layers.0"), wait("h2d", 0, 9, "it")])) == []


def test_waits_of_a_kind_are_added_up_and_the_longest_unit_is_named() -> None:
    waits = [
        of_block(0, 0.0, 0.5),
        of_block(1, 1.0, 1.25),
        of_block(10, 2.0, 2.25),
        of_block(10, 6.0, 6.25, "backward"),
    ]
    largest = largest_waits(step_of([], waits))
    assert [wait.sentence for wait in largest] == [
        "compute waited 1.00 s for the weights of 3 units in a slot of the window (longest: layers.0, 0.50 s) "
        "in forward",
        "compute waited 0.25 s for the weights of layers.10 in a slot of the window in backward",
    ]
    assert largest_waits(step_of([], waits), count=1) == largest[:1]


def test_parts_of_an_update_are_one_kind() -> None:
    waits = [wait("compute", n, n + 1, f"part {n} of 19 of the update of outer", "update", "forward") for n in (1, 2)]
    (largest,) = largest_waits(step_of([], waits))
    assert largest.sentence == "compute waited 2.00 s for the update of outer in forward"


def test_what_is_shorter_than_a_thousandth_of_the_step_is_not_named() -> None:
    assert largest_waits(step_of([], [of_block(0, 0.0, 0.009)])) == []


@pytest.mark.parametrize(
    ("at", "phase"),
    [
        (-0.5, "before the first block"),
        (1.5, "in forward"),
        (3.5, "after the last block's forward"),
        (6.5, "in backward"),
        (9.0, "after the last block's backward"),
    ],
)
def test_a_wait_outside_of_the_blocks_says_between_which(at: float, phase: str) -> None:
    step = step_of([*FORWARD, *BACKWARD], [wait("compute", at, at + 0.2, "it", "", "outside of the blocks")])
    assert [cause.phase for cause in causes(step)] == [phase]


def test_shares() -> None:
    step = step_of(
        [
            work("update", "update", "outer", -1.0, 2.0),
            work("update", "update", "layers.0", 3.0, 4.0),
            work("ssd", "states read", "outer", 0.0, 8.0),
            work("ssd", "states read", "layers.0", 1.0, 9.0),
        ],
        [wait("update", 1.0, 3.0, "a gradient"), wait("update", 2.5, 3.0, "a part of it")],
        ssd_busy_s=5.0,
    )
    shares = {share.lane: (share.busy_s, share.waited_s, share.idle_s) for share in lane_shares(step)}
    assert shares == {"update": (3.0, 1.0, 6.0), "ssd": (5.0, 0.0, 5.0)}


def test_durations() -> None:
    assert [duration(seconds) for seconds in (12.25, 0.31, 0.0471, 0.00042)] == [
        "12.25 s",
        "0.31 s",
        "47.1 ms",
        "0.4 ms",
    ]
