"""What `ds-slide plan` has the engine decide is what the engine decides where it measures the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from contexts import context_of

from ds_slide.cli.planning import steady
from ds_slide.compression.codec import Identity
from ds_slide.model.layout import ParameterInfo, build_layout
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.low_precision import STATE_FORMATS
from ds_slide.plan.forecast import CONTEXT_BYTES, WORKSPACE_BYTES, Room
from ds_slide.plan.keeping import Keepable, Kept
from ds_slide.plan.memory import Plan
from ds_slide.plan.mixtures import Mixture
from ds_slide.plan.movable import movable_states, summable_units, summed_units, window_slots
from ds_slide.plan.needs import Needs, Placement, UnitSize
from ds_slide.plan.spare import Movable, Slots, Summable
from ds_slide.plan.step_model import Schedules, Step
from ds_slide.report.statistics import StepStatistics
from ds_slide.runtime.activations.activations import Activations
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.memory.gpu_room import Budget
from ds_slide.runtime.memory.spare_memory import LOOKS, SpareMemory
from ds_slide.runtime.updates.passes import Passes

NOTHING = Kept()
NUMEL, BLOCKS, WINDOW = 1 << 22, 12, 8
NEEDED = 400 << 20


def unit(index: int) -> UnitSize:
    from ds_slide.store.state_buffers import optimizer_buffers

    layout = build_layout([ParameterInfo(f"{index}.weight", (NUMEL,), NUMEL, 0)], 1)
    specs = optimizer_buffers(torch.bfloat16, ADAMW, STATE_FORMATS["fp32"])
    kind: Any = "outer" if index == BLOCKS else "block"
    return UnitSize(str(index), layout, Identity(layout, torch.bfloat16), kind, specs, 2)


def made(*, window_grows: bool) -> Plan:
    needs = Needs(held_bytes=2, window=3, ring=0, window_grows=window_grows)
    return Plan.of([unit(index) for index in range(BLOCKS + 1)], needs, Placement(window=WINDOW))


class Steps:
    """Forecasts of a forward of a second, and as much again where nothing is on the GPU."""

    def __init__(self, micro_batches: int = 1) -> None:
        self.micro_batches = micro_batches

    def step(self, plan: Plan, _: Kept = NOTHING, /, **__: bool) -> Step:
        left = 1 - len(plan.placement.promoted) / len(plan.units)
        lanes = {"compute": 1.0, "update": 1.2 * left, "h2d": 0.3}
        return Step("deferred", max(1.0 + left, 1.2 * left), lanes, micro_batches=self.micro_batches)


class SlowCopies(Steps):
    """The same with gradients that take long on their way down, but for sums."""

    def step(self, plan: Plan, _: Kept = NOTHING, /, **__: bool) -> Step:
        step = super().step(plan)
        down = 4.0 * (1 - (len(plan.placement.promoted) + 0.75 * len(plan.placement.summed)) / len(plan.units))
        return replace(step, step_s=max(step.step_s, down), lanes={**step.lanes, "d2h": down}, down_s=down)


def asked(plan: Plan, spare: steady.Spare, blocks: Sequence[Keepable] = (), **others: Any) -> steady.Question:
    return steady.Question(
        plan, spare, blocks, **{"forecaster": Steps(), "moves_states": True, "forwards": 1, **others}
    )


class Engine:
    """A GPU and the states of units, as `SpareMemory` knows them, with the bytes of a plan."""

    def __init__(self, plan: Plan, total: int) -> None:
        self.plan, self.total, self.most = plan, total, 0
        self.accumulates = False

    def memory(self) -> tuple[int, int]:
        return self.total - CONTEXT_BYTES - self.allocated(), self.total

    def allocated(self) -> int:
        return self.plan.gpu_bytes + WORKSPACE_BYTES

    def peak(self) -> int:
        return self.allocated() + NEEDED

    def reset_peak(self) -> None: ...

    def allocation_retries(self) -> int:
        return 0

    def memory_rate(self) -> float | None:
        return None

    def release_cached(self) -> None: ...

    def movable(self, forwards: int) -> Sequence[Movable]:
        return movable_states(self.plan, forwards)

    def promoted(self) -> Sequence[Movable]:
        there = self.plan.placement.promoted
        return [Movable(index, 1, 0.1) for index in sorted(there)]

    def summable(self, forwards: int) -> Sequence[Summable]:
        return summable_units(self.plan, forwards)

    def summed(self) -> Sequence[Movable]:
        return summed_units(self.plan)

    def on_their_way(self) -> int:
        return 0

    def slots(self, forwards: int) -> Slots:
        return window_slots(self.plan, forwards)

    def may_park(self) -> bool:
        return False

    def park(self) -> int:
        raise AssertionError("nothing may be parked")

    def give_up_sum(self) -> int:
        raise AssertionError("nothing may be given up")

    def may_move(self) -> bool:
        return not self.accumulates

    def move(self, orders: frozenset[int], slots: int | None = None, summed: frozenset[int] | None = None) -> bool:
        placement = self.plan.placement
        wanted = placement.window if slots is None else slots
        sums = placement.summed if summed is None else summed
        self.plan = self.plan.with_promoted(orders, max(wanted, self.slots(1).least), sums)
        return True


def run(engine: Engine, forwards: int, limit: int | None, forecaster: Steps) -> Plan:
    """Steps of the engine, until it has decided."""
    device = Device(torch.device("cpu"))

    class OfPlan(Budget):
        @property
        def placed(self) -> int:
            return engine.plan.gpu_bytes

    class Updating:
        passes = Passes("auto")

        def schedules(self) -> Schedules:
            schedule = forecaster.step(engine.plan).schedule
            return Schedules(schedule, schedule)

        def products_s(self) -> None:
            """Nothing is updated by Muon."""

    context = context_of(device)
    spare = SpareMemory(context, Activations(context, []), OfPlan(engine, limit), Updating())
    spare.room.states, engine.accumulates = engine, forwards > 1
    for number in range(LOOKS[-1]):
        step = forecaster.step(engine.plan)
        lanes: Any = {lane: {"busy_s": seconds} for lane, seconds in step.lanes.items()}
        lanes["update"]["holding_s"] = step.holding_s
        context.recorder.latest = StepStatistics(number, step.step_s, 1.0, "compute", lanes, {})
        for _ in range(forwards):
            spare.begin_forward((), {"input_ids": torch.zeros(1, 16, dtype=torch.long)})
            spare.end_forward()
        spare.end_step()
    return engine.plan


def test_the_steps_before_the_last_decision_keep_what_the_first_one_chose() -> None:
    """Their peak is one that a run has."""
    plan = made(window_grows=True)
    mixture = Mixture(frozenset({("aten.mm.default", 0)}), 20 << 20, 0.5)
    blocks = [Keepable(index, 80 << 20, 0.01, (mixture,)) for index in range(BLOCKS)]
    spare = steady.Spare(Room(1900 << 20, 1 << 40), NEEDED, None, tied=False)
    found = steady.decide(asked(plan, spare, blocks, moves_states=False))
    ((first, kept),) = found.before
    assert first == plan and kept.mixed and found.kept == kept


def test_the_first_look_measures_updates_in_one_pass() -> None:
    """Whatever the schedule is that the engine has later: a wait that two passes would not have moves units."""
    plan = made(window_grows=True)

    class WithoutWait(Steps):
        def step(self, plan: Plan, _: Kept = NOTHING, /, *, two: bool = True, **__: bool) -> Step:
            step = super().step(plan)
            return replace(step, step_s=1.0, lanes={**step.lanes, "update": 0.5}) if two else step

    spare = steady.Spare(Room(1900 << 20, 1 << 40), NEEDED, None, tied=False)
    predicted = steady.decide(asked(plan, spare, forecaster=WithoutWait())).plan
    one_pass = steady.decide(asked(plan, spare)).plan
    assert predicted.placement == one_pass.placement and len(one_pass.placement.promoted) > 5


def test_a_limit_of_the_allocator_leaves_the_context_out() -> None:
    whole = Room(24 << 30, 1 << 40)
    assert whole.gpu_for_plan == (24 << 30) - CONTEXT_BYTES
    assert replace(whole, context_bytes=0).gpu_for_plan == 24 << 30


@pytest.mark.parametrize("total", [1750 << 20, 1900 << 20])
def test_the_engine_decides_the_same_about_sums(total: int) -> None:
    plan = made(window_grows=True)
    spare = steady.Spare(Room(total, 1 << 40), NEEDED, None, tied=True)
    predicted = steady.decide(asked(plan, spare, forwards=4, forecaster=SlowCopies(4))).plan
    assert predicted.placement == run(Engine(plan, total), 4, None, SlowCopies(4)).placement
    assert len(predicted.placement.summed) > BLOCKS / 2


@pytest.mark.parametrize("forwards", [1, 4])
@pytest.mark.parametrize("window_grows", [True, False])
@pytest.mark.parametrize("limit", [None, 400 << 20])
@pytest.mark.parametrize("total", [1600 << 20, 1900 << 20, 2400 << 20, 8 << 30])
def test_the_engine_decides_the_same(forwards: int, window_grows: bool, limit: int | None, total: int) -> None:
    plan = made(window_grows=window_grows)
    spare = steady.Spare(Room(total, 1 << 40), NEEDED, limit, tied=forwards > 1)
    predicted = steady.decide(asked(plan, spare, forwards=forwards, forecaster=Steps(forwards))).plan
    decided = run(Engine(plan, total), forwards, limit, Steps(forwards))
    assert predicted.placement == decided.placement
    # In the least memory the headroom of an accumulation takes all that there is, and in the most all units fit.
    assert bool(predicted.placement.promoted) == (total > 1600 << 20 or forwards == 1)
    assert total < 8 << 30 or limit is not None or len(predicted.placement.promoted) == BLOCKS + 1
