"""When deferred updates are done in two passes: decided by the engine from measured seconds, and by a forecast from
predicted ones."""

from __future__ import annotations

from typing import Literal, NamedTuple

Schedule = Literal["under backward", "deferred", "two passes", "speculative"]
PASS_SHARE = 18 / 26
"""Bytes of either pass over those of a whole update, of AdamW in fp32; so does its time."""
FIRST_PASS = 1 / 2
"""Of the time of both."""
UPDATE_BOUND = 0.9
"""Forward waits for updates that take at least this part of it."""


class Schedules(NamedTuple):
    """Of the updates that ran in the latest step, and of those that it has queued."""

    measured: Schedule
    coming: Schedule


def exceeds(whole: float, forward: float) -> bool:
    """Whether whole updates of so many seconds do not fit under a forward."""
    return whole > UPDATE_BOUND * forward


def second_fits(whole: float, backward: float) -> bool:
    """Whether the second pass of such updates fits under a backward."""
    return whole * PASS_SHARE < backward
