"""How long a step takes: its lanes by their ceilings, and the way in which they wait for each other.

A step is simulated from the beginning of its last backward to the end of the next forward, unit by unit: gradients go
down as they are complete, updates run when they may, by deadline, weights go up as they are updated, and a block
computes when it has them. The other micro-batches of a step wait for transfers only.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ds_slide.plan.allocations import BLOCK_RING, STAGINGS, is_gathered, streamed, undo_bytes
from ds_slide.plan.disk import StatesOnSsd
from ds_slide.plan.memory import Plan
from ds_slide.plan.needs import Needs, UnitSize, held_bytes
from ds_slide.plan.rates import (
    STATES_PASS_RATE,
    UP_BESIDE_UPDATE,
    UPDATE_LOSES_DOWN,
    UPDATE_LOSES_UP,
    WEIGHTS_PASS_RATE,
    Launched,
    Rates,
)
from ds_slide.plan.trace import Segment, StepTrace
from ds_slide.plan.two_passes import Schedule, exceeds, second_pays

SCHEDULES: tuple[Schedule, ...] = ("under backward", "deferred", "two passes", "speculative")
STEP_S = 8e-3
"""Of a GPU that stands still between two steps while the host reads the norm, queues updates and fetches (4 to 7 ms of
`step()` where nothing is copied then, page before-after) and comes to the first launch of the next forward: 6 and 11 ms
in all (benchmarks/results/2026-11-26_nvidia-h100_host-and-kernels.md). It counts as compute, as in the engine's
statistics."""
BACKWARD_BEGINS_S = 8e-3
"""Of the host, between a launched forward and the first backward of a block: DeepSpeed's `backward()`, autograd's
thread and the loss. With it six of seven settings whose updates are as long as their forward have the schedule that
the engine chose (benchmarks/results/2026-11-25_nvidia-h100_forecast.md and 2026-11-23_nvidia-h200_hand-sweep.md)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. `lanes`: busy seconds of each; of those of the update `holding_s` go to gradients of later
    micro-batches, which are added to those before them. `ssd_read`, `ssd_written`: bytes, and `ssd_inputs` those of
    them that are inputs of blocks."""

    schedule: Schedule
    why: str
    """The schedule is this one, as a clause."""
    forward_s: float
    """Of all micro-batches."""
    backward_s: float
    lanes: Mapping[str, float]
    ssd_read: int
    ssd_written: int
    ssd_inputs: int = 0
    holding_s: float = 0.0

    @property
    def step_s(self) -> float:
        return max(self.forward_s + self.backward_s, *self.lanes.values())

    @property
    def bound_lane(self) -> str:
        """The busiest lane."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])

    @property
    def bound_s(self) -> float:
        return self.lanes[self.bound_lane]


def step_time(
    plan: Plan,
    needs: Needs,
    trace: StepTrace,
    rates: Rates,
    *,
    micro_batches: int,
    two: bool,
    below_limit: bool = False,
) -> StepTime:
    """In the schedule that the engine takes. `two`: the rule's updates may be done in two passes. `below_limit`: norms
    are, so that updates may be done ahead."""
    step = _Step(plan, needs, trace, rates, micro_batches)
    if not needs.held_bytes:
        return step.time("under backward", "no gradient is held, and an update waits for its own alone")
    one_pass = step.time("deferred", "gradients are held until the norm is known")
    # The engine's clock is the host's, which is ahead of the GPU, but for the updates that it waits for.
    whole, forward = one_pass.lanes["update"] - one_pass.holding_s, step.forward_of_host()
    if not whole:
        return replace(one_pass, why="all states are on the GPU, and are updated there when the norm is known")
    if not exceeds(whole, forward):
        return replace(
            one_pass, why="gradients are held until the norm is known, and updates fit under the next forward"
        )
    if below_limit and plan.placement.ways_back - plan.placement.promoted:
        return step.time("speculative", "norms stay below the limit, and updates of blocks begin before they are known")
    held = f"gradients are held until the norm is known, and updates of {whole:.3f} s"
    if not two or plan.placement.chunks_on_ssd:
        return one_pass
    if not second_pays(whole, step.behind_updates() + step.backward_until_updates()):
        return replace(one_pass, why=f"{held} are too long for a second pass beside the backward")
    return step.time("two passes", f"{held} do not fit under the next forward of {forward:.3f} s")


def all_schedules(
    plan: Plan, needs: Needs, trace: StepTrace, rates: Rates, micro_batches: int
) -> dict[Schedule, StepTime]:
    """What each schedule would take, the exact norm of clipping left out where it forbids one."""
    step = _Step(plan, needs, trace, rates, micro_batches)
    return {schedule: step.time(schedule) for schedule in SCHEDULES}


@dataclass(frozen=True)
class _Unit:
    """Seconds that a unit takes on every lane in a step. `encode`, `apply`: of its codec, on the GPU. `holding`: to add
    the gradient of one micro-batch to those before it. `beside_up`, `beside_down`: that an update of the CPU loses to
    its copies. `undo`: an undo log. `ahead`: its update may begin before the norm is known."""

    h2d: float = 0.0
    encode: float = 0.0
    apply: float = 0.0
    d2h: float = 0.0
    update: float = 0.0
    weights_pass: float = 0.0
    states_pass: float = 0.0
    holding: float = 0.0
    undo: float = 0.0
    ahead: bool = False
    ssd: float = 0.0
    beside_up: float = 0.0
    beside_down: float = 0.0


class _Step:
    """The parts of a step's simulation that do not depend on the schedule."""

    def __init__(self, plan: Plan, needs: Needs, trace: StepTrace, rates: Rates, micro_batches: int) -> None:
        self._plan, self._trace, self._rates, self._micro_batches = plan, trace, rates, micro_batches
        self._streamed = sorted(streamed(plan.units, plan.placement))
        self._fetched_again = self._streamed[: max(0, len(self._streamed) - plan.placement.window)]
        self._parts = _parts(plan.units)
        self._ring = plan.entry(BLOCK_RING).count
        self._states_on_ssd = StatesOnSsd.of(plan)
        self.ssd_read = self.ssd_written = 0
        self._units = [self._lanes_of(index, unit, needs) for index, unit in enumerate(plan.units)]
        without_waits = Launched(rates)
        for segment in trace.forward:
            self._run(without_waits, segment)
        self.compute_forward = without_waits.now
        self._ahead = without_waits.ahead
        """Of the host, when a backward begins."""
        for segment in trace.backward:
            self._run(without_waits, segment)
        self._compute_backward = without_waits.now - self.compute_forward
        on_gpu = [plan.units[index] for index in plan.placement.on_gpu | plan.placement.promoted]
        self._gpu_update = sum(update_bytes(unit) for unit in on_gpu) / rates.copy
        self._disk_ahead = self._states_on_ssd.ahead / rates.ssd if rates.ssd else 0.0
        self._inputs_down, self._inputs_up = trace.moved_bytes / rates.d2h, trace.moved_bytes / rates.h2d
        self._inputs_ssd = trace.on_ssd_bytes / rates.ssd if rates.ssd else 0.0
        """Each way."""
        self.ssd_inputs = 2 * trace.on_ssd_bytes * micro_batches
        self.ssd_read += trace.on_ssd_bytes * micro_batches
        self.ssd_written += trace.on_ssd_bytes * micro_batches

    def _lanes_of(self, index: int, unit: UnitSize, needs: Needs) -> _Unit:
        placement, rates = self._plan.placement, self._rates
        if index in placement.on_gpu | placement.promoted or not needs.trains:
            return _Unit()
        read = written = 0
        if index in placement.chunks_on_ssd:
            read, written = read + self._states_on_ssd.read[index], written + unit.state_bytes
        if index in placement.weights_on_ssd:
            again = index in self._fetched_again
            read += unit.share * (1 + again + 2 * again * (self._micro_batches - 1))
            written += unit.share
        held = held_bytes(unit, needs)
        if index in placement.gradients_on_ssd:
            read, written = read + held * self._micro_batches, written + held * self._micro_batches
        self.ssd_read, self.ssd_written = self.ssd_read + read, self.ssd_written + written
        gradient = unit.codec.nbytes
        whole = update_bytes(unit)
        moments = sum(spec.nbytes(unit.codec.numel) for spec in unit.specs if spec.name != "remainder")
        trains = bool(unit.codec.numel)
        # The parts of all ranks, which each of them reads, or its own, which it gathers with the others' on the GPU.
        parts = 1 if is_gathered(index, needs, placement) else needs.world_size
        up = parts * unit.written_bytes if trains or index in self._streamed else 0
        return _Unit(
            h2d=up / rates.h2d,
            encode=unit.codec.encode_traffic / rates.copy,
            apply=unit.codec.apply_traffic(unit.weight_bytes if needs.rounds_masters else 4) / rates.copy,
            d2h=gradient / rates.d2h,
            update=whole / rates.update,
            weights_pass=(whole - moments) / (WEIGHTS_PASS_RATE * rates.update),
            states_pass=(gradient + 2 * moments) / (STATES_PASS_RATE * rates.update) if trains else 0.0,
            holding=(2 * held + gradient) / rates.update if held else 0.0,
            undo=undo_bytes(unit, needs) / rates.update if index in placement.undo_logs else 0.0,
            ahead=index in placement.ways_back,
            ssd=(read + written) / rates.ssd if rates.ssd else 0.0,
            beside_up=UPDATE_LOSES_UP * up / rates.update if trains else 0.0,
            beside_down=UPDATE_LOSES_DOWN * gradient / rates.update,
        )

    def time(self, schedule: Schedule, why: str = "") -> StepTime:
        units = self._units
        ahead = [schedule == "under backward" or (schedule == "speculative" and each.ahead) for each in units]
        update = [each.update + each.beside_up for each in units]
        later = [0.0] * len(units)
        if schedule == "two passes":
            update = [each.weights_pass + each.beside_up for each in units]
            later = [each.states_pass + each.beside_down for each in units]
        if schedule == "speculative":
            update = [seconds + each.undo for seconds, each in zip(update, units, strict=True)]
        begun = self.behind_updates(update) if any(later) else 0.0
        through_ring = schedule == "under backward" and self._ring
        backward, arrived = self._backward(later, begun, update if through_ring else ())
        begin = backward + STEP_S
        arrived = [each if early else begin for each, early in zip(arrived, ahead, strict=True)]
        down_until = backward if any(ahead) else 0.0
        done, busy = _by_deadline(
            arrived,
            update,
            [each.ssd for each in units],
            [each.beside_down for each in units],
            down_until=down_until,
            disk_ahead=self._disk_ahead,
        )
        end = self._forward(begin + self._gpu_update, done).now
        more = self._micro_batches - 1
        again = sum(units[index].h2d for index in self._fetched_again)
        down, holding = sum(each.d2h for each in units), sum(each.holding for each in units)
        inputs_down, inputs_up, inputs_ssd = self._inputs_down, self._inputs_up, self._inputs_ssd
        encode, apply = sum(each.encode for each in units), sum(each.apply for each in units)
        compute = self._micro_batches * (self.compute_forward + self._compute_backward + encode) + apply
        return StepTime(
            schedule,
            why,
            forward_s=max(end - backward, inputs_down, inputs_ssd)
            + more * max(self.compute_forward, again, inputs_down, inputs_ssd),
            backward_s=max(backward, inputs_up, inputs_ssd)
            + more * max(self._compute_backward, again + inputs_up, down, holding, inputs_ssd),
            lanes={
                "compute": compute + self._gpu_update + STEP_S,
                "h2d": sum(each.h2d for each in units) + again * (2 * more + 1) + inputs_up * self._micro_batches,
                "d2h": (down + inputs_down) * self._micro_batches,
                "update": busy + sum(later) + more * holding,
                "ssd": sum(each.ssd for each in units) + 2 * inputs_ssd * self._micro_batches,
            },
            ssd_read=self.ssd_read,
            ssd_written=self.ssd_written,
            ssd_inputs=self.ssd_inputs,
            holding_s=more * holding,
        )

    def _run(self, step: Launched, segment: Segment, more: float = 0.0) -> None:
        """`more`: seconds of the GPU behind the segment's own."""
        step.run(segment.operations, more, visits=segment.unit in self._streamed)

    def backward_until_updates(self) -> float:
        """Seconds until the backward of one micro-batch has come to the last unit that the host updates."""
        step, reached = Launched(self._rates, host=-self._ahead), 0.0
        for segment in self._trace.backward:
            self._run(step, segment)
            if segment.unit is not None and self._units[segment.unit].update:
                reached = step.now
        return reached

    def behind_updates(self, update: Sequence[float] | None = None) -> float:
        """Seconds of a forward that are left when the deferred updates have ended that it waits for; by default those
        in one pass."""
        done = self._one_behind_the_other(update)
        return self._forward(self._gpu_update, done).now - max(done)

    def forward_of_host(self) -> float:
        """Seconds until the host has launched a forward that waits for updates in one pass, and a block's backward
        begins."""
        return self._forward(0.0, self._one_behind_the_other()).host + BACKWARD_BEGINS_S

    def _one_behind_the_other(self, update: Sequence[float] | None = None) -> list[float]:
        """When deferred updates have ended, from the step's end; by default those in one pass."""
        update = [each.update + each.beside_up for each in self._units] if update is None else update
        none, ssd = [0.0] * len(self._units), [each.ssd for each in self._units]
        done, _ = _by_deadline(none, update, ssd, none, down_until=0.0, disk_ahead=self._disk_ahead)
        return done

    def _backward(self, later: Sequence[float], begun: float, update: Sequence[float]) -> tuple[float, list[float]]:
        """When the last backward has ended, from its begin, and when each gradient has come down. `later`: updates of
        states that precede these, the last unit's first, of which the first begins `begun` seconds before it.
        `update`: of the updates that give the ring's buffers back; none where gradients wait for none of them."""
        arrived = [0.0] * len(self._units)
        ready, lane = [0.0] * len(self._units), -begun
        for index in reversed(range(len(self._units))):
            lane += later[index]
            ready[index] = lane
        step, copied, updated = Launched(self._rates, host=-self._ahead), [0.0] * STAGINGS, [0.0] * self._ring
        slower = self._rates.d2h / self._rates.both_ways if self._fetched_again else 1.0
        for segment in self._trace.backward:
            number = segment.unit
            self._run(step, segment, 0.0 if number is None else self._units[number].encode)
            if number is None or not self._units[number].d2h:
                continue
            step.now = max(step.now, copied[-STAGINGS])  # the host goes on
            if later[number]:
                step.wait(ready[number])
            begin = max(copied[-1], step.now)
            if update:  # whichever units the updates are of, each gives one buffer back
                begin = max(begin, updated[-self._ring])
            arrived[number] = begin + self._units[number].d2h * slower
            copied.append(arrived[number])
            if update:
                updated.append(max(updated[-1], arrived[number]) + update[number])
        up = sum(self._units[index].h2d for index in self._fetched_again)
        return max(step.now, copied[-1], up), arrived

    def _forward(self, begin: float, done: Sequence[float]) -> Launched:
        """The end of the forward that begins at `begin`, with weights that are updated at `done`."""
        ready, lane, updates_end = [], 0.0, max(done, default=0.0)
        for unit, updated in zip(self._units, done, strict=True):
            lane = max(lane, updated)
            lane += unit.h2d / (UP_BESIDE_UPDATE if lane < updates_end else 1.0) + unit.apply
            ready.append(lane if unit.h2d else begin)
        outer = [index for index, unit in enumerate(self._plan.units) if unit.stays]
        step = Launched(self._rates, begin, begin, updates_end)
        blocks = [segment.unit for segment in self._trace.forward if segment.unit is not None]
        first = min(blocks, default=len(self._units))
        step.wait(max((ready[index] for index in outer if index < first), default=begin))
        for segment in self._trace.forward:
            if segment.unit is not None:
                step.wait(max([ready[segment.unit], *(ready[part] for part in self._parts[segment.unit])]))
            self._run(step, segment)
        # What is needed behind the blocks, as an untied head, comes after them in the order of updates as well.
        step.wait(max((ready[index] for index in outer), default=begin))
        return step


def _parts(units: Sequence[UnitSize]) -> list[list[int]]:
    """Of each unit those that are parts of it, whose names are its own with more in parentheses."""
    parts = [index for index, unit in enumerate(units) if unit.kind == "part"]
    return [[part for part in parts if units[part].name.startswith(f"{unit.name} (")] for unit in units]


def update_bytes(unit: UnitSize) -> int:
    """That the update of a unit reads and writes: its gradient; weight and state buffers, there and back."""
    if not unit.codec.numel:
        return 0
    weight = unit.written_bytes if unit.codec.compresses else unit.layout.trainable_numel * unit.weight_bytes
    return unit.codec.nbytes + 2 * (weight + unit.state_bytes)


def _by_deadline(
    arrived: Sequence[float],
    update: Sequence[float],
    ssd: Sequence[float],
    beside_down: Sequence[float],
    *,
    down_until: float,
    disk_ahead: float,
) -> tuple[list[float], float]:
    """When each unit is updated: of those whose gradients have arrived always the first, and not before the disk has
    read and written what it needs, in the same order. -> also busy seconds. `beside_down`: that an update takes longer
    while gradients come down, until `down_until`. `disk_ahead`: seconds of the disk's work that need not wait for the
    gradients."""
    waiting = sorted(range(len(arrived)), key=lambda index: arrived[index])
    done, now, disk, busy = [0.0] * len(arrived), 0.0, -disk_ahead, 0.0
    ready: list[int] = []
    while waiting or ready:
        if not ready:
            now = max(now, arrived[waiting[0]])
        while waiting and arrived[waiting[0]] <= now:
            heapq.heappush(ready, waiting.pop(0))
        index = heapq.heappop(ready)
        if ssd[index]:
            disk = max(disk, arrived[index] - disk_ahead) + ssd[index]
        seconds = update[index] + (beside_down[index] if now < down_until else 0.0)
        now, busy = now + seconds, busy + seconds
        done[index] = max(now, disk) if ssd[index] else now
        now = done[index] if ssd[index] else now
    return done, busy
