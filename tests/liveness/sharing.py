"""Which operations are points of the scheduler: those that cannot be swapped with every operation of other threads.

These are taking a lock, setting an event and putting into a queue, in so far as several threads take, ask and put. A
critical section is one step therefore, and waiting for an event that is set or taking from a queue that is not empty is
none.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from liveness.scheduler import LogicalThread, active

Place = tuple[Any, ...]
FRAMES_OF_A_PLACE = 3
"""A future is made by one of a few lines of its class; who made the future is told by the frames around."""


class Sharing:
    """What was seen of the places in the code that make locks, events and queues, over all runs of an exploration.

    A lock that one thread takes, an event that nobody asks and a queue into which one thread puts need no points. Where
    that turns out to be wrong after it was relied upon, `changed` says that the exploration has to begin again.
    """

    def __init__(self, *, all_points: bool = False) -> None:
        self.all_points = all_points
        self.users: dict[Place, int] = {}
        self.shared: set[Place] = set()
        self.changed = False

    def share(self, place: Place) -> None:
        if place not in self.shared:
            self.shared.add(place)
            self.changed = True

    def is_shared(self, place: Place) -> bool:
        return self.all_points or place in self.shared


_STAND_INS = ("/liveness/sharing.py", "/liveness/locks.py", "/liveness/stand_ins.py")
_sharing = Sharing()


def use_sharing(new: Sharing) -> None:
    global _sharing
    _sharing = new


def sharing() -> Sharing:
    """That of the exploration under way."""
    return _sharing


def place_of_caller() -> tuple[Place, str]:
    """Where the calling constructor was called from: the innermost frames outside the stand-ins, and the name of the
    first of them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_STAND_INS):
        frame = frame.f_back
    maker = "" if frame is None else frame.f_code.co_qualname
    found: list[tuple[str, int]] = []
    while frame is not None and len(found) < FRAMES_OF_A_PLACE:
        found.append((frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    scheduler = active()
    if scheduler is not None and not scheduler.exploring:
        # While the engine is built nothing is chosen: the number of an object is the same in every run.
        scheduler.objects += 1
        return (*found, scheduler.objects), maker
    return tuple(found), maker


class Shared:
    """Something that was made at a place."""

    def __init__(self) -> None:
        self.place, self.made_in = place_of_caller()
        self._user: LogicalThread | None = None

    def describe(self) -> str:
        kind = type(self).__name__
        at = ", ".join(f"{name}:{line}" for name, line in self.place[:2])
        return f"{kind} made at {at}"

    def used_by(self, thread: LogicalThread | None) -> None:
        if thread is None or self._user is thread:
            return
        if self._user is None:
            self._user = thread
        else:
            _sharing.share(self.place)
