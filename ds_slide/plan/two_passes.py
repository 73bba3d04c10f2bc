"""When deferred updates are done in two passes: decided by the engine from measured seconds, and by a forecast from
predicted ones."""

from __future__ import annotations

from typing import Literal, NamedTuple

Schedule = Literal["under backward", "deferred", "two passes", "speculative"]
PASS_SHARE = 18 / 26 / 0.95
"""Of the time of a whole update, that either pass takes: of AdamW in fp32 18 of its 26 bytes a parameter, at little
less than its rate. 0.62 to 0.77 in trainings on two H100 hosts and 0.74 on one of an H200
(benchmarks/results/2026-11-26_nvidia-h100_forecast.md, 2026-11-23_nvidia-h200_hand-sweep.md), 0.79 to 0.85 on another
(page passes)."""
FIRST_PASS = 1 / 2
"""Of the time of both."""
UPDATE_BOUND = 0.9
"""Forward waits for updates that take at least this part of it."""
FORWARD_SHARE = 1 / 2
"""Of the time of a backward, that a forward takes: one product for two, or three where blocks are recomputed."""


class Schedules(NamedTuple):
    """Of the updates that ran in the latest step, and of those that it has queued."""

    measured: Schedule
    coming: Schedule


def exceeds(whole: float, forward: float) -> bool:
    """Whether whole updates of so many seconds do not fit under a forward."""
    return whole > UPDATE_BOUND * forward


def second_pays(whole: float, hides: float) -> bool:
    """Whether two passes of updates of so many seconds, which a forward waits for, make a step shorter. `hides`:
    seconds from the end of what it waits for until its backward has come to the last unit that is updated.

    One pass takes the update, these seconds and the rest of the backward. Two take the first pass, the second one or
    these seconds, whichever are more, and the same rest.
    """
    return whole * (2 * PASS_SHARE - 1) < hides


def one_backward(seconds: float, backwards: int) -> float:
    """Of so many that have taken so long, with a forward between each two."""
    return seconds / (backwards + (backwards - 1) * FORWARD_SHARE)
