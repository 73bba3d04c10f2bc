"""The length of a step with each schedule of updates, from the seconds that it asks of each lane.

A step has two parts: the backward of its last micro-batch, which gradients and updates follow, and the first forward of
the next step, which waits for updated weights. The forwards and backwards of the other micro-batches wait only for
transfers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_slide.plan.step_model.step import Schedule, Step
from ds_slide.plan.step_model.two_passes import PASS_SHARE, Updates

SCHEDULES: tuple[Schedule, ...] = ("under backward", "deferred", "two passes", "speculative")


@dataclass(frozen=True)
class Work:
    """Seconds that a step asks of each lane.

    `forward`, `backward`, `launched`, `again`, `down`, `holding` and `inputs_*` count for one micro-batch. All others
    count once a step.
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
    """The time from the begin of a backward until the last gradient for the CPU is complete."""
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
    updates = updates_of(work)
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
    return {schedule: step_of(work, schedule) for schedule in SCHEDULES}


def updates_of(work: Work) -> Updates:
    """Return the deferred updates of `work`, and the seconds that hide them."""
    queue = _queue(work, work.update)
    forward = _forward(work, queue, work.outer + work.outer_copies, work.begun)
    # The engine measures a forward by the host's clock. The host is ahead of the GPU, and waits only for updates.
    return Updates(work.update, max(work.launched, queue), forward - queue, work.reach)


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
    queue = max(0.0, work.lead + _queue(work, early + undo) - backward) + late if early else _queue(work, late)
    late_outer = work.outer_last if schedule == "under backward" else 1.0
    outer, begun = late_outer * one * work.outer, one * work.begun
    if early:
        queue = max(queue, outer)
        outer = min(queue, outer + begun) if outer else 0.0
    forward = _forward(work, queue, outer + late_outer * work.outer_copies, begun)
    # Second passes begin when the first ones have ended, and precede the backward from unit to unit.
    backward = max(backward, second - (forward - queue) + work.backward - work.reach)
    more = work.micro_batches - 1
    lanes = {
        "compute": work.micro_batches * (work.forward + work.backward) + work.gpu_update,
        "h2d": work.up + work.again * (2 * more + 1) + work.inputs_up * work.micro_batches,
        "d2h": (work.down + work.inputs_down) * work.micro_batches,
        "update": one * work.update + second + undo + more * work.holding,
        "ssd": work.ssd + 2 * work.inputs_ssd * work.micro_batches,
    }
    forward += more * max(work.forward, work.again, work.inputs_down, work.inputs_ssd)
    backward += more * max(work.backward, work.again + work.inputs_up, work.down, work.holding, work.inputs_ssd)
    return Step(
        schedule,
        max(forward + backward, *lanes.values()),
        lanes,
        holding_s=more * work.holding,
        inputs_share=work.inputs_share,
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
