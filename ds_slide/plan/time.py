"""How long a step takes: its lanes by their ceilings, and the way in which they wait for each other.

A step is simulated from the beginning of its last backward to the end of the next forward, unit by unit: gradients go
down as they are complete, updates run when they may, by deadline, weights go up as they are updated, and a block
computes when it has them. The other micro-batches of a step wait for transfers only.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ds_slide.plan.allocations import streamed
from ds_slide.plan.memory import Plan
from ds_slide.plan.needs import Needs, UnitSize, held_bytes
from ds_slide.plan.rates import Rates
from ds_slide.plan.trace import StepTrace, per_unit

Schedule = Literal["under backward", "deferred", "two passes", "speculative"]
SCHEDULES: tuple[Schedule, ...] = ("under backward", "deferred", "two passes", "speculative")
PASS_RATE = 0.86
"""Of the rate of a whole update: two passes move 1.38 times its bytes and took 1.58 to 1.62 times as long (3 B on an
H200 with 16 cores, benchmarks/results/2026-11-23_nvidia-h200-x2_passes.md)."""
UNDO_BYTES = 3
"""Of a parameter: what a speculative update writes to be able to be taken back (2 to 3)."""
TWO_PASSES_FROM = 0.9
"""Of the forward: where the updates take as long, they are done in two passes (ds_slide.runtime.updates.passes)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. `lanes`: busy seconds of each. `ssd_read`, `ssd_written`: bytes."""

    schedule: Schedule
    forward_s: float
    """Of all micro-batches."""
    backward_s: float
    lanes: Mapping[str, float]
    ssd_read: int
    ssd_written: int

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


def step_time(plan: Plan, needs: Needs, trace: StepTrace, rates: Rates, *, micro_batches: int, two: bool) -> StepTime:
    """In the schedule that the engine takes. `two`: the rule's updates may be done in two passes."""
    step = _Step(plan, needs, trace, rates, micro_batches)
    if not needs.held_bytes:
        return step.time("under backward")
    one_pass = step.time("deferred")
    whole = one_pass.lanes["update"]
    passes = step.time("two passes")
    if two and not plan.placement.chunks_on_ssd and whole > TWO_PASSES_FROM * step.compute_forward:
        return min(one_pass, passes, key=lambda each: each.step_s)
    return one_pass


def all_schedules(
    plan: Plan, needs: Needs, trace: StepTrace, rates: Rates, micro_batches: int
) -> dict[Schedule, StepTime]:
    """What each schedule would take, the exact norm of clipping left out where it forbids one."""
    step = _Step(plan, needs, trace, rates, micro_batches)
    return {schedule: step.time(schedule) for schedule in SCHEDULES}


@dataclass(frozen=True)
class _Unit:
    """Seconds that a unit takes on every lane in a step."""

    h2d: float
    d2h: float
    update: float
    weights_pass: float
    states_pass: float
    undo: float
    ssd: float


class _Step:
    """The parts of a step's simulation that do not depend on the schedule."""

    def __init__(self, plan: Plan, needs: Needs, trace: StepTrace, rates: Rates, micro_batches: int) -> None:
        self._plan, self._trace, self._rates, self._micro_batches = plan, trace, rates, micro_batches
        self._streamed = sorted(streamed(plan.units, plan.placement))
        self._fetched_again = self._streamed[: max(0, len(self._streamed) - plan.placement.window)]
        self.ssd_read = self.ssd_written = 0
        self._units = [self._lanes_of(index, unit, needs) for index, unit in enumerate(plan.units)]
        forward, backward = (per_unit(segments) for segments in (trace.forward, trace.backward))
        self.compute_forward = sum(map(rates.seconds, forward.values()))
        self.compute_backward = sum(map(rates.seconds, backward.values()))
        on_gpu = [plan.units[index] for index in plan.placement.on_gpu]
        self._gpu_update = sum(update_bytes(unit) for unit in on_gpu) / rates.copy

    def _lanes_of(self, index: int, unit: UnitSize, needs: Needs) -> _Unit:
        placement, rates = self._plan.placement, self._rates
        if index in placement.on_gpu or not needs.trains:
            return _Unit(0, 0, 0, 0, 0, 0, 0)
        read = written = 0
        if index in placement.chunks_on_ssd:
            read, written = read + unit.state_bytes, written + unit.state_bytes
        if index in placement.weights_on_ssd:
            again = index in self._fetched_again
            read += unit.share * (1 + again + 2 * again * (self._micro_batches - 1))
            written += unit.share
        if index in placement.gradients_on_ssd:
            held = held_bytes(unit, needs) * self._micro_batches
            read, written = read + held, written + held
        self.ssd_read, self.ssd_written = self.ssd_read + read, self.ssd_written + written
        gradient = unit.codec.nbytes
        master = unit.layout.trainable_numel * unit.weight_bytes
        whole = update_bytes(unit)
        moments = sum(spec.nbytes(unit.codec.numel) for spec in unit.specs if spec.name != "remainder")
        trains = bool(unit.codec.numel)
        return _Unit(
            h2d=unit.share / rates.h2d if trains or index in self._streamed else 0.0,
            d2h=gradient / rates.d2h,
            update=whole / rates.update,
            weights_pass=(whole - moments) / (PASS_RATE * rates.update),
            states_pass=(gradient + 2 * moments) / (PASS_RATE * rates.update) if master else 0.0,
            undo=UNDO_BYTES * unit.codec.numel / rates.update,
            ssd=(read + written) / rates.ssd if rates.ssd else 0.0,
        )

    def time(self, schedule: Schedule) -> StepTime:
        passes, units = schedule == "two passes", self._units
        update = [
            each.weights_pass if passes else each.update + each.undo * (schedule == "speculative") for each in units
        ]
        later = [each.states_pass for each in units] if passes else [0.0] * len(units)
        backward, arrived = self._backward(later)
        if schedule in ("deferred", "two passes"):
            arrived = [backward] * len(units)
        done = _by_deadline(arrived, update, [each.ssd for each in units])
        end = self._forward(backward + self._gpu_update, done)
        more = self._micro_batches - 1
        again = sum(units[index].h2d for index in self._fetched_again)
        down = sum(each.d2h for each in units)
        return StepTime(
            schedule,
            forward_s=end - backward + more * max(self.compute_forward, again),
            backward_s=backward + more * max(self.compute_backward, again, down),
            lanes={
                "compute": self._micro_batches * (self.compute_forward + self.compute_backward) + self._gpu_update,
                "h2d": sum(each.h2d for each in units) + again * (2 * more + 1),
                "d2h": down * self._micro_batches,
                "update": sum(update) + sum(later),
                "ssd": sum(each.ssd for each in units),
            },
            ssd_read=self.ssd_read,
            ssd_written=self.ssd_written,
        )

    def _backward(self, later: Sequence[float]) -> tuple[float, list[float]]:
        """When the last backward has ended, from its begin, and when each gradient has come down. `later`: updates of
        states that precede these, the last unit's first."""
        arrived = [0.0] * len(self._units)
        ready, lane = [0.0] * len(self._units), 0.0
        for index in reversed(range(len(self._units))):
            lane += later[index]
            ready[index] = lane
        now = copied = 0.0
        slower = self._rates.d2h / self._rates.both_ways if self._fetched_again else 1.0
        for segment in self._trace.backward:
            now += self._rates.seconds(segment.operations)
            if segment.unit is not None:
                now = max(now, ready[segment.unit] if later[segment.unit] else 0.0)
                copied = max(copied, now) + self._units[segment.unit].d2h * slower
                arrived[segment.unit] = copied
        up = sum(self._units[index].h2d for index in self._fetched_again)
        return max(now, copied, up), arrived

    def _forward(self, begin: float, done: Sequence[float]) -> float:
        """When the forward has ended that begins at `begin`, with weights that are updated at `done`."""
        ready, lane = [], 0.0
        for unit, updated in zip(self._units, done, strict=True):
            lane = max(lane, updated) + unit.h2d
            ready.append(lane if unit.h2d else begin)
        outer = [index for index, unit in enumerate(self._plan.units) if unit.stays]
        now = begin
        blocks = [segment.unit for segment in self._trace.forward if segment.unit is not None]
        first = min(blocks, default=len(self._units))
        now = max([now, *(ready[index] for index in outer if index < first)])
        for segment in self._trace.forward:
            if segment.unit is not None:
                now = max(now, ready[segment.unit])
            now += self._rates.seconds(segment.operations)
        # What is needed behind the blocks, as an untied head, comes after them in the order of updates as well.
        return max([now, *(ready[index] for index in outer)])


def update_bytes(unit: UnitSize) -> int:
    """That the update of a unit reads and writes: its gradient; weight and state buffers, there and back."""
    if not unit.codec.numel:
        return 0
    weight = unit.layout.trainable_numel * unit.weight_bytes
    return unit.codec.nbytes + 2 * (weight + unit.state_bytes)


def _by_deadline(arrived: Sequence[float], update: Sequence[float], ssd: Sequence[float]) -> list[float]:
    """When each unit is updated: of those whose gradients have arrived always the first, and not before the disk has
    read and written what it needs, in the same order."""
    waiting = sorted(range(len(arrived)), key=lambda index: arrived[index])
    done, now, disk = [0.0] * len(arrived), 0.0, 0.0
    ready: list[int] = []
    while waiting or ready:
        if not ready:
            now = max(now, arrived[waiting[0]])
        while waiting and arrived[waiting[0]] <= now:
            heapq.heappush(ready, waiting.pop(0))
        index = heapq.heappop(ready)
        disk = max(disk, arrived[index] if ssd[index] else 0.0) + ssd[index]
        now += update[index]
        done[index] = max(now, disk)
        now = done[index] if ssd[index] else now
    return done
