"""The one model of how long a step takes.

Step            seconds of a step and of its lanes: a forecast, or what the engine has measured.
Step.after      The same step after a `Change`. The engine and `ds-slide plan` share out spare memory by it.
UpdateTimes     seconds that tell both whether updates are done in two passes.
Work            seconds that a step asks of each lane. `ds_slide.plan.step_work` makes it from a plan and ceilings.
step_of(work)   The step with one schedule of updates. `scheduled` takes the schedule that the engine takes.

A step has two parts: the backward of its last micro-batch, which gradients and updates follow, and the first forward of
the next step, which waits for updated weights. The forwards and backwards of the other micro-batches wait only for
transfers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

Schedule = Literal["under backward", "deferred", "two passes", "speculative"]


BACKWARD_SHARE = 2 / 3
"""Part of a micro-batch's products that backward computes."""


class Schedules(NamedTuple):
    """`measured`: the schedule of the latest step. `coming`: the schedule of the updates that it has queued. `two`,
    `due`: of a `Step`."""

    measured: Schedule
    coming: Schedule
    two: bool = False
    due: float = 1.0


@dataclass(frozen=True)
class Change:
    """What moves to the GPU, or stays there.

    `kept_s`: seconds of recomputation saved. `moved_share`: part of the CPU's updates that moves. `gpu_update_s`:
    seconds that the GPU takes for these updates, and to add up gradients. `fetches`: fetches of blocks, as a multiple
    of the present number. `disk_share`: part of the states on SSD that moves. `summed_share`: part of the CPU's
    additions of gradients that moves. `down_share`: part of the copies of gradients to the host that this saves.
    """

    kept_s: float = 0.0
    moved_share: float = 0.0
    gpu_update_s: float = 0.0
    fetches: float = 1.0
    disk_share: float = 0.0
    summed_share: float = 0.0
    down_share: float = 0.0


def _added_by_host(change: Change) -> float:
    """Return the part of the host's additions of gradients that stays with it."""
    return max(0.0, 1.0 - change.moved_share - change.summed_share)


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
    down_s: float = 0.0
    """Seconds of the copies of gradients to the host."""
    micro_batches: int = 1
    two: bool = False
    """Deferred updates may be done in two passes."""
    due: float = 1.0
    """The part of the updates whose second pass the next backward waits for (`UpdateTimes.due`)."""
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
    def products_s(self) -> float:
        """Seconds of that wait in which the GPU makes products of updates (Muon), wherever their states are. They are
        spread over the time of the update lane. The products of a measured step that lie beside the GPU's own work are
        in its time."""
        waited_share = min(1.0, self.stall_s / (self.lanes.get("update", 0.0) or math.inf))
        return min(self.stall_s, self.lanes.get("products", 0.0) * waited_share)

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

    def computing(self, seconds: float) -> Step:
        """Return this step with a GPU that computes for at most `seconds`. What that had hidden may then show."""
        faster = replace(self, lanes={**self.lanes, "compute": min(seconds, self.lanes["compute"])})
        shorter = self._of_phases(Change()) - faster._of_phases(Change())
        return replace(faster, step_s=self.step_s - shorter)

    def after(self, change: Change) -> float:
        """Return the predicted seconds of this step after `change`.

        Work that is hidden costs nothing until what hides it has become shorter. The GPU waits for the end of a queue,
        and each second that leaves the queue shortens the wait by a second until the wait is over: 7.6 B waited 0.32 s
        of 1.50, and 0.05 s of 1.24 when 12 of its 28 blocks had moved. Where the disk is busy for longer than the
        queue, the updates themselves wait for the disk. Where the copies to the GPU take longest, the GPU waits for
        them. Products of updates stay with the GPU.

        With several micro-batches most fetches, copies and additions of gradients are under forwards and backwards that
        wait for nothing else (`_of_phases`), and what the GPU waits beyond these is its wait for the queue.
        """
        fetching = self.lanes.get("h2d", 0.0)
        disk, off_disk = self.lanes.get("ssd", 0.0), change.disk_share * (1.0 - self.inputs_share)
        now, then = self._of_phases(Change()), self._of_phases(change)
        waited = max(0.0, self.step_s - now)
        if disk > self.queue_s:
            gone = max(waited, disk) * off_disk
        else:
            gone = max(waited, self.queue_s) * self._gone_share(change)
        if self.micro_batches == 1 and fetching > disk and fetching == self.busiest_s:
            gone = max(gone, fetching * (1.0 - change.fetches))
        return max(
            then * min(1.0, self.step_s / now if now else 1.0) + max(min(waited, self.products_s), waited - gone),
            self._of_others(change),
            fetching * change.fetches,
            disk * (1.0 - off_disk),
        )

    def _gone_share(self, change: Change) -> float:
        """Return the part of the queue that goes with `change`. With several micro-batches, sums on the GPU may make
        room for second passes, and then the queue is as long as the first ones."""
        if not self.two or self.micro_batches == 1:
            return change.moved_share
        now, then = self._queue_of(Change()), self._queue_of(change)
        return 1.0 - then / now if now else 0.0

    def _queue_of(self, change: Change) -> float:
        """Return the seconds of the queue after `change`, with the passes that the engine would choose."""
        staying, added = 1.0 - change.moved_share, _added_by_host(change)
        whole = staying * self.queue_s / (PASS_SHARE if self.schedule == "two passes" else 1.0)
        due = self.due * added / staying if staying else 0.0
        forwards, backwards = self._phases(change)
        backward = backwards / self.micro_batches
        updates = UpdateTimes(whole, 0.0, 0.0, backward, due, forwards + backwards - self.holding_s * added)
        if not updates.second_pass_pays:
            return whole
        return updates.pass_s + max(0.0, due * updates.pass_s - backward)

    def _of_phases(self, change: Change) -> float:
        """Return the seconds of all forwards and all backwards after `change`."""
        return sum(self._phases(change))

    def _phases(self, change: Change) -> tuple[float, float]:
        """Return the seconds of all forwards, and of all backwards, after `change`. With several micro-batches each
        half of the fetches is under the ones or the others, and gradients move under backwards alone. With a single one
        all of that is taken to be hidden."""
        computes = self.lanes["compute"] - change.kept_s + change.gpu_update_s
        forward, backward = (1.0 - BACKWARD_SHARE) * computes, BACKWARD_SHARE * computes
        if self.micro_batches == 1:
            return forward, backward
        fetching, staying = self.lanes.get("h2d", 0.0) * change.fetches / 2, 1.0 - change.moved_share
        down = self.lanes.get("d2h", 0.0) * staying - self.down_s * change.down_share
        holding = self.holding_s * _added_by_host(change)
        return max(forward, fetching), max(backward, fetching, down, holding)

    def _of_others(self, change: Change) -> float:
        """Return the busy seconds, after `change`, of the busiest lane beside the GPU, the disk and the copies to the
        GPU."""
        saved = {"update": self.holding_s * change.summed_share, "d2h": self.down_s * change.down_share}
        lanes = ((s, saved.get(lane, 0.0)) for lane, s in self.lanes.items() if lane not in ("compute", "ssd", "h2d"))
        return max((seconds * (1.0 - change.moved_share) - less for seconds, less in lanes), default=0.0)


# ----------------------------------------------------------------------------------------------------------------------
# Whether deferred updates are done in two passes: the weights under the next forward, the states under its backward.
#
# The next forward needs only the new weights. The first pass reads gradient, states and master and writes the master.
# The second computes the same states from the same inputs and writes them, before the block's next gradient arrives.
# For AdamW in fp32 each pass moves 18 bytes a parameter instead of 26. A step then takes max(forward, first pass) +
# max(backward, second pass) instead of max(forward, update) + backward.

PASS_SHARE = 18 / 26 / 0.95
"""Time of either pass, as a part of a whole update's time: AdamW moves 18 of its 26 bytes, at little less than its
rate. It was 0.62 to 0.77 in trainings on two H100 hosts, 0.74 on one H200 host, and 0.79 to 0.85 on another
(benchmarks/results/2026-11-26_nvidia-h100_forecast.md, 2026-11-23_nvidia-h200_hand-sweep.md, page passes)."""
UPDATE_BOUND = 0.9
"""A forward that waits for updates is at most this much longer than they are."""
IDLE_SHARE = 0.95
"""Second passes that would fill the lane's idle time beyond this part hold up the last backward. A lane that is never
idle with two passes goes back to one."""


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of deferred updates in one pass, and of the work that hides them.

    `forward_s`: from the end of a step until the next backward begins, waits included. `left_s`: remaining seconds of
    the forward when the awaited updates have ended. `reach_s`: from the begin of the backward until it comes to the
    last unit whose second pass it waits for. `due`: the part of the updates that are of such units. The others have
    their gradients added up on the GPU, and their second passes have time until the last backward of the step.
    `idle_s`: seconds of a step with one pass in which the update lane has nothing to do."""

    whole_s: float
    forward_s: float
    left_s: float
    reach_s: float
    due: float = 1.0
    idle_s: float = math.inf

    @classmethod
    def measured(cls, busy_s: float, forward_s: float, reach_s: float, *, in_two: bool) -> UpdateTimes:
        """Return the updates of a measured step. `busy_s`: busy seconds of the update lane. `in_two`: in two passes."""
        whole, awaited = (busy_s / (2 * PASS_SHARE), busy_s / 2) if in_two else (busy_s, busy_s)
        return cls(whole, forward_s, max(0.0, forward_s - awaited), reach_s)

    def beside(self, due: float, idle_s: float, *, in_two: bool) -> UpdateTimes:
        """Return these updates with `due`, in a step that was measured. `idle_s`: of that step, whose updates were
        `in_two` passes. With a single pass it would have been longer by what two save, and the lane less busy by what
        the other pass takes."""
        found = replace(self, due=due, idle_s=idle_s)
        return replace(found, idle_s=idle_s + found._late_s + found._idle_before) if in_two else found

    @property
    def exceed_forward(self) -> bool:
        """Whether a forward does not hide them."""
        return self.whole_s > UPDATE_BOUND * self.forward_s

    @property
    def second_pass_pays(self) -> bool:
        """Whether two passes make the step shorter, where updates do not fit under the forward.

        With one pass the backward gets to that unit after whole_s + left_s + reach_s. With two it takes the first
        pass, and then the second passes that are due or left_s + reach_s, whichever is longer. The other second passes
        need a lane that is idle for long enough beside these: a step that is shorter by whole_s - PASS_SHARE * whole_s
        has to hold them, too.
        """
        if self._late_s > IDLE_SHARE * max(0.0, self.idle_s - self._idle_before):
            return False
        return self.whole_s * (PASS_SHARE * (1 + self.due) - 1) < self.left_s + self.reach_s

    @property
    def pass_s(self) -> float:
        """Seconds of either pass."""
        return PASS_SHARE * self.whole_s

    @property
    def _late_s(self) -> float:
        """Seconds of the second passes that only the last backward of a step waits for."""
        return (1 - self.due) * self.pass_s

    @property
    def _idle_before(self) -> float:
        """Idle seconds of the lane that the second passes take which the next backward waits for."""
        return min(self.due * self.pass_s, self.left_s + self.reach_s)

    @property
    def two_passes_pay(self) -> bool:
        return self.exceed_forward and self.second_pass_pays


def mean_backward_s(seconds: float, backwards: int) -> float:
    """Return the mean seconds of one backward, from `seconds` over `backwards` of them. Between each two lies a forward
    of half that time."""
    return seconds / (backwards + (backwards - 1) / 2)


# ----------------------------------------------------------------------------------------------------------------------
# The length of a step with each schedule of updates, from the seconds that it asks of each lane.


@dataclass(frozen=True)
class Work:
    """Seconds that a step asks of each lane.

    `forward`, `backward`, `launched`, `again`, `down`, `summed`, `holding` and `inputs_*` count for one micro-batch.
    All others count once a step.
    """

    forward: float
    """The GPU computes a forward."""
    backward: float
    """The GPU computes a backward, recomputation included."""
    launched: float = 0.0
    """The host launches a forward: it waits for updates, and not for the GPU."""
    micro_batches: int = 1
    gpu_update: float = 0.0
    """Updates of units whose states are on the GPU."""
    up: float = 0.0
    """Copies of updated weights to the GPU."""
    again: float = 0.0
    """Copies of blocks that have left the window, in a backward, or in a forward after the first one."""
    down: float = 0.0
    """Copies of gradients to the host."""
    update: float = 0.0
    """Updates by the CPU, whole."""
    summed: float = 0.0
    """The part of `down` that is copied in the last micro-batch alone: sums that the GPU has made."""
    holding: float = 0.0
    """The CPU adds gradients to the sums of earlier micro-batches."""
    ahead: float = 0.0
    """The part of `update` that may run before the norm is known."""
    undo: float = 0.0
    """The CPU writes undo logs for these updates."""
    ssd: float = 0.0
    """The disk reads and writes states, weights and gradients."""
    ssd_ahead: float = 0.0
    """The part of `ssd` that need not wait for the gradients."""
    inputs_down: float = 0.0
    inputs_up: float = 0.0
    inputs_ssd: float = 0.0
    """Inputs of blocks on their way to SSD; the way back takes the same seconds."""

    # ---- when updates begin, and what waits for them ----
    lead: float = 0.0
    """The time from the begin of a backward until the first gradient for the CPU is complete."""
    reach: float = 0.0
    """The time from the begin of a backward until the last gradient for the CPU is complete, of those that no sum on
    the GPU takes."""
    due: float = 1.0
    """The part of `update` whose second pass the next backward waits for (`UpdateTimes.due`)."""
    outer: float = 0.0
    """The part of `update` for outer modules, which a forward needs first."""
    outer_last: float = 0.0
    """Share of `outer` whose gradients are final after all blocks' gradients: an embedding's, and not a head's."""
    outer_copies: float = 0.0
    """Copies of outer modules' gradients down and of their weights up."""
    begun: float = 0.0
    """The longest update of one block. An update that has begun is not interrupted by a more urgent one."""
    from_first: float = 0.0
    """The time from the first block that waits for an update to the end of a forward."""
    behind: float = 0.0
    """The time from the last block that waits for an update to the end of a forward."""
    through_ring: float = 0.0
    """Share of `update` that must have ended before the last gradient finds a host buffer, where none is held."""

    # ---- flags, bytes and shares ----
    held: bool = True
    """Gradients are held until the norm is known."""
    two: bool = True
    """The updates may be done in two passes."""
    ssd_read: int = 0
    """Bytes a step; `ssd_written`, too."""
    ssd_written: int = 0
    inputs_share: float = 0.0
    """Part of the disk's bytes that are inputs of blocks."""


def scheduled(work: Work, *, below_limit: bool = False) -> Step:
    """Return the step with the schedule that the engine takes. `below_limit`: norms stay below the limit of clipping,
    so that updates may be speculative."""
    if not work.held:
        return step_of(work, "under backward", "no gradient is held, and an update waits for its own alone")
    one = step_of(work, "deferred", "gradients are held until the norm is known")
    if not work.update:
        return replace(one, why="all states are on the GPU, and are updated there when the norm is known")
    updates = replace(updates_of(work), idle_s=one.step_s - one.lanes["update"])
    if not updates.exceed_forward:
        return replace(one, why="gradients are held until the norm is known, and updates fit under the next forward")
    if below_limit and work.ahead:
        why = "norms stay below the limit, and updates of blocks begin before they are known"
        return step_of(work, "speculative", why)
    if not work.two:
        return one
    held = f"gradients are held until the norm is known, and updates of {work.update:.3f} s"
    if not updates.second_pass_pays:
        return replace(one, why=f"{held} are too long for a second pass beside the backward")
    return step_of(work, "two passes", f"{held} hold up the next forward")


def all_schedules(work: Work) -> dict[Schedule, Step]:
    """Return the step with each schedule, allowed or not."""
    return {schedule: step_of(work, schedule) for schedule in get_args(Schedule)}


def updates_of(work: Work) -> UpdateTimes:
    """Return the deferred updates of `work`, and the seconds that hide them."""
    queue = _queue(work, work.update)
    forward = _forward(work, queue, work.outer + work.outer_copies, work.begun)
    # The engine measures a forward by the host's clock. The host is ahead of the GPU, and waits only for updates.
    return UpdateTimes(work.update, max(work.launched, queue), forward - queue, work.reach, work.due)


def step_of(work: Work, schedule: Schedule, why: str = "") -> Step:
    """Return the step with this schedule."""
    in_two = schedule == "two passes"
    one = PASS_SHARE if in_two else 1.0
    second = one * work.update if in_two else 0.0
    undo = work.undo if schedule == "speculative" else 0.0
    # The last backward ends with its own products, or with what its gradients wait for.
    backward = max(work.backward, work.again + work.inputs_up, work.lead + work.down, work.inputs_ssd)
    if schedule == "under backward":
        backward = max(backward, work.lead + work.through_ring * work.update)
    # Updates begin under the backward where they may. The rest of them is due before the forward ends.
    early = {"under backward": work.update, "speculative": work.ahead}.get(schedule, 0.0)
    late = one * (work.update - early)
    if early or schedule == "under backward":
        queue = max(0.0, work.lead + _queue(work, early + undo) - backward) + late
    else:
        queue = _queue(work, late)
    late_outer = work.outer_last if schedule == "under backward" else 1.0
    outer, begun = late_outer * one * work.outer, one * work.begun
    if early:
        queue = max(queue, outer)
        outer = min(queue, outer + begun) if outer else 0.0
    forward = _forward(work, queue, outer + late_outer * work.outer_copies, begun)
    # Second passes begin when the first ones have ended, and precede the backward from unit to unit. Those that are not
    # due there are in the time of their lane.
    backward = max(backward, work.due * second - (forward - queue) + work.backward - work.reach)
    more = work.micro_batches - 1
    lanes = {
        "compute": work.micro_batches * (work.forward + work.backward) + work.gpu_update,
        "h2d": work.up + work.again * (2 * more + 1) + work.inputs_up * work.micro_batches,
        "d2h": (work.down + work.inputs_down) * work.micro_batches - more * work.summed,
        "update": one * work.update + second + undo + more * work.holding,
        "ssd": work.ssd + 2 * work.inputs_ssd * work.micro_batches,
    }
    forward += more * max(work.forward, work.again, work.inputs_down, work.inputs_ssd)
    down = work.down - work.summed
    backward += more * max(work.backward, work.again + work.inputs_up, down, work.holding, work.inputs_ssd)
    return Step(
        schedule,
        max(forward + backward, *lanes.values()),
        lanes,
        holding_s=more * work.holding,
        inputs_share=work.inputs_share,
        down_s=work.down + more * down,
        micro_batches=work.micro_batches,
        two=work.two,
        due=work.due,
        why=why,
        forward_s=forward,
        backward_s=backward,
        ssd_read=work.ssd_read,
        ssd_written=work.ssd_written,
    )


def _queue(work: Work, update: float) -> float:
    """Return the seconds of a queue of updates, which the disk may hold up."""
    return max(update, work.ssd - work.ssd_ahead)


def _forward(work: Work, queue: float, outer: float, begun: float) -> float:
    """Return the seconds of the first forward. All updates have ended after `queue` seconds. Outer modules are back on
    the GPU after `outer`, and the first block is updated `begun` seconds later."""
    blocks = max(min(queue, outer + begun) + work.from_first, queue + work.behind)
    return max(work.gpu_update + outer + work.forward, blocks, work.up, work.inputs_down, work.inputs_ssd)
