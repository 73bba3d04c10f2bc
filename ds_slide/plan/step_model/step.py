"""A step in seconds, measured or forecast, and its predicted seconds after a change of placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

Schedule = Literal["under backward", "deferred", "two passes", "speculative"]


class Schedules(NamedTuple):
    """`measured`: the schedule of the latest step. `coming`: the schedule of the updates that it has queued."""

    measured: Schedule
    coming: Schedule


@dataclass(frozen=True)
class Change:
    """What moves to the GPU, or stays there.

    `kept_s`: seconds of recomputation saved. `moved_share`: part of the CPU's updates that moves. `gpu_update_s`:
    seconds that the GPU takes for these updates. `fetches`: fetches of blocks, as a multiple of the present number.
    `disk_share`: part of the states on SSD that moves.
    """

    kept_s: float = 0.0
    moved_share: float = 0.0
    gpu_update_s: float = 0.0
    fetches: float = 1.0
    disk_share: float = 0.0


@dataclass(frozen=True)
class Step:
    """Seconds of a step. A step that was measured has no `why` and no phases."""

    schedule: Schedule
    step_s: float
    lanes: Mapping[str, float]
    """Busy seconds of each lane."""
    holding_s: float = 0.0
    """Seconds that the update lane adds gradients of later micro-batches to the earlier sums."""
    inputs_share: float = 0.0
    """Part of the disk's bytes that are inputs of blocks. They stay on the disk when states leave it."""
    why: str = ""
    """Why the schedule is this one, as a clause."""
    forward_s: float = 0.0
    """Seconds of the forwards of all micro-batches."""
    backward_s: float = 0.0
    ssd_read: int = 0
    """Bytes."""
    ssd_written: int = 0

    @property
    def bound_lane(self) -> str:
        """The busiest lane."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])

    @property
    def bound_s(self) -> float:
        return self.lanes[self.bound_lane]

    @cached_property
    def stall_s(self) -> float:
        """Seconds that the GPU waits."""
        return max(0.0, self.step_s - self.lanes["compute"])

    @cached_property
    def busiest_s(self) -> float:
        """Busy seconds of the busiest lane beside the GPU and the disk."""
        return max((seconds for lane, seconds in self.lanes.items() if lane not in ("compute", "ssd")), default=0.0)

    @cached_property
    def queue_s(self) -> float:
        """Seconds of the queue whose end the GPU waits for. With deferred updates a forward waits for their first
        pass; gradients that are added up make that queue no longer."""
        if self.schedule == "under backward":
            return self.busiest_s
        updates = max(0.0, self.lanes.get("update", 0.0) - self.holding_s)
        return updates / 2 if self.schedule == "two passes" else updates

    def recomputing(self, seconds: float) -> Step:
        """Return this step with `seconds` more of recomputation."""
        lanes = {**self.lanes, "compute": self.lanes["compute"] + seconds}
        return replace(self, step_s=self.step_s + seconds, lanes=lanes)

    def after(self, change: Change) -> float:
        """Return the predicted seconds of this step after `change`.

        Work that is hidden costs nothing until what hides it has become shorter. The GPU waits for the end of a queue,
        and each second that leaves the queue shortens the wait by a second until the wait is over: 7.6 B waited 0.32 s
        of 1.50, and 0.05 s of 1.24 when 12 of its 28 blocks had moved. Where the disk is busy for longer than the
        queue, the updates themselves wait for the disk.
        """
        computes = self.lanes["compute"] - change.kept_s + change.gpu_update_s
        disk, off_disk = self.lanes.get("ssd", 0.0), change.disk_share * (1.0 - self.inputs_share)
        if disk > self.queue_s:
            gone = max(self.stall_s, disk) * off_disk
        else:
            gone = max(self.stall_s, self.queue_s) * change.moved_share
        return max(
            computes + max(0.0, self.stall_s - gone),
            self.busiest_s * (1.0 - change.moved_share),
            self.lanes.get("h2d", 0.0) * change.fetches,
            disk * (1.0 - off_disk),
        )
