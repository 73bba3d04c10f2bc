"""The window: what is in a slot when it is used, what is requested ahead, and what makes room."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_slide.errors import SlideError
from ds_slide.plan.spare import Slots
from ds_slide.report.statistics import LaneMeter
from ds_slide.runtime.core.device import PASSED, Device
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.lanes import Delay, StreamWorker, UpdateWorker
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.weights.window import Direction, Slot, Window

NUMEL = 64


class Ahead:
    """Keeps what it is told of: the orders of the blocks."""

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.told: list[tuple[list[int], list[int]]] = []

    def expect(self, coming: Sequence[Unit], in_backward: Sequence[Unit]) -> None:
        self.told.append(([unit.order for unit in coming], [unit.order for unit in in_backward]))


class Rig:
    """A window over units with real lanes; `delay_ms` shakes the order in which threads run."""

    def __init__(self, units: Sequence[Unit], slots: int, failures: Failures, delay_ms: float = 0.0) -> None:
        device = Device(torch.device("cpu"))
        self.units = units
        self.failures = failures
        self.fills: list[int] = []
        self.h2d = StreamWorker("h2d", device, failures, LaneMeter(), Delay(delay_ms, 1))
        self.updates = UpdateWorker(device, failures, LaneMeter(), Delay(delay_ms, 2))
        buffers = [torch.full((NUMEL,), -1.0) for _ in range(slots)]
        context: Any = SimpleNamespace(device=device, lanes=SimpleNamespace(h2d=self.h2d), failures=failures)
        self.window = Window(context, units, buffers, self)

    def fill(self, unit: Unit, buffer: torch.Tensor, *, without_experts: bool = False) -> int:
        assert not without_experts
        self.fills.append(unit.order)
        buffer.copy_(unit.state.weights.buffer.tensor)
        return NUMEL * 4

    def update(self, unit: Unit) -> None:
        """Adds one to the weights on the update lane, as an optimizer step does."""
        update = unit.open_update(self.failures)

        def run() -> int:
            unit.state.weights.buffer.tensor.add_(1.0)
            update.finish(0)
            return 0

        self.updates.submit(unit.order, PASSED, run)

    def use(self, unit: Unit, direction: Direction) -> Slot:
        slot = self.window.acquire(unit, direction)
        assert slot.ready is not None
        slot.ready.wait()
        return slot

    def through(self, order: Sequence[Unit], direction: Direction) -> None:
        """Use and release each unit; its content has to be its newest weights."""
        for unit in order:
            slot = self.use(unit, direction)
            assert slot.buffer.tolist() == [100.0 * unit.order + unit.version] * NUMEL
            if direction == "forward":
                unit.uses.begun += 1
            elif direction == "backward":
                unit.uses.ended += 1
            self.window.release(slot)

    def close(self) -> None:
        self.updates.close()
        self.h2d.close()


@pytest.fixture
def rig(make_units: Any, failures: Failures) -> Any:
    made: list[Rig] = []

    def make(count: int, slots: int) -> Rig:
        made.append(Rig(make_units(count), slots, failures))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_training_order_is_fetched_ahead_and_only_once(rig: Any, slots: int) -> None:
    own = rig(6, slots)
    own.window.prefetch(None, "forward")
    for step in range(3):
        own.through(own.units, "forward")
        own.through(own.units[::-1], "backward")
        for unit in own.units:
            own.update(unit)
            unit.uses.begun = unit.uses.ended = 0
        own.window.prefetch(None, "forward")
        own.h2d.drain()
        assert own.window.misses == 0
        if step == 0:
            # Forward fetches each block once, backward those that forward did not leave in the slots.
            assert own.fills[: 12 - slots] == [*range(6), *range(5 - slots, -1, -1)]


def test_a_slot_for_each_block_spares_backward_and_other_micro_batches_the_fetch(rig: Any) -> None:
    own = rig(6, 6)
    own.window.prefetch(None, "forward")
    for step in range(1, 4):
        for _ in range(3):
            own.through(own.units, "forward")
            own.through(own.units[::-1], "backward")
        own.h2d.drain()
        assert own.fills == [*range(6)] * step
        for unit in own.units:
            own.update(unit)
            unit.uses.begun = unit.uses.ended = 0
        own.window.prefetch(None, "forward")
    assert own.window.misses == 0


def test_new_weights_come_to_the_slot_of_the_old_ones(rig: Any) -> None:
    own = rig(6, 6)
    own.window.prefetch(None, "forward")
    places = []
    for _ in range(3):
        own.through(own.units, "forward")
        own.through(own.units[::-1], "backward")
        places.append([slot.unit.order for slot in own.window.slots])
        for unit in reversed(own.units):
            own.update(unit)
            unit.uses.begun = unit.uses.ended = 0
            own.window.prefetch(unit, "forward")
        own.h2d.drain()
    assert places == [places[0]] * 3


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("slots", [2, 3, 5, 6])
def test_a_step_fetches_what_the_plan_counts(rig: Any, slots: int, micro_batches: int) -> None:
    own, fetched = rig(6, slots), []
    own.window.prefetch(None, "forward")
    for _ in range(3):
        for _ in range(micro_batches):
            own.through(own.units, "forward")
            own.through(own.units[::-1], "backward")
        own.h2d.drain()
        fetched.append(len(own.fills))
        for unit in own.units:
            own.update(unit)
            unit.uses.begun = unit.uses.ended = 0
        own.window.prefetch(None, "forward")
    counted = Slots(slots, 2, 1, 6, 2 * micro_batches).fetches(0, slots)
    assert [later - sooner for sooner, later in itertools.pairwise(fetched)] == [counted] * 2


def test_what_comes_next_is_announced_once_and_in_order(rig: Any) -> None:
    """Blocks still to be fetched; in backward also those whose backward is to come, wherever they are."""
    own = rig(6, 3)
    own.window._ahead = ahead = Ahead(2)
    told = ahead.told
    own.window.prefetch(None, "forward")
    own.h2d.drain()
    own.through(own.units[:2], "forward")
    own.h2d.drain()
    own.window.prefetch(own.units[1], "forward")
    assert told[-1] == ([4, 5], [])
    own.through(own.units[2:], "forward")
    own.h2d.drain()
    own.window.prefetch(own.units[5], "backward")
    assert told[-1] == ([2, 1], [5, 4])


def test_the_block_that_compute_waits_for_is_announced_first(rig: Any) -> None:
    """Its update has to find a buffer: nothing may be held back for what comes after it."""
    own = rig(6, 2)
    own.window._ahead = ahead = Ahead(3)
    told = ahead.told
    pending = own.units[1].open_update(own.failures)
    own.through(own.units[:1], "forward")
    own.window.release(own.window.acquire(own.units[1], "forward"))
    assert told[-1] == ([1, 2, 3], [])
    pending.finish(0)
    own.h2d.drain()
    own.window.prefetch(own.units[1], "forward")
    assert told[-1] == ([3, 4, 5], [])  # its slot is filled, and so is that of the next


def test_inference_starts_again_from_the_front(rig: Any) -> None:
    own = rig(5, 2)
    own.window.prefetch(None, "forward")
    for _ in range(3):
        own.through(own.units, "inference")
    own.h2d.drain()
    assert own.window.misses == 0
    assert own.fills == [*range(5)] * 3 + [0]


def test_unexpected_order_is_fetched_on_demand(rig: Any) -> None:
    own = rig(6, 2)
    own.window.prefetch(None, "forward")
    own.through([own.units[i] for i in (4, 0, 3, 3, 5, 1)], "forward")
    assert own.window.misses > 0


def test_bound_slots_are_not_taken(rig: Any) -> None:
    own = rig(5, 2)
    held = own.use(own.units[0], "forward")
    own.through(own.units[1:], "forward")
    assert held.buffer.tolist() == [0.0] * NUMEL
    own.use(own.units[1], "forward")
    with pytest.raises(
        SlideError, match=r"no slot of the window is free for blocks\.2: all 2 hold .* raise ds_slide\.window"
    ):
        own.window.acquire(own.units[2], "forward")
    own.window.release(held)
    own.through([own.units[2]], "forward")


def test_fill_waits_for_the_update(rig: Any) -> None:
    own = rig(3, 2)
    may_update = threading.Event()
    own.updates.submit(-1, PASSED, lambda: int(may_update.wait(30)))
    own.update(own.units[0])
    slot = own.window.acquire(own.units[0], "forward")
    assert not slot.ready.is_complete
    may_update.set()
    slot.ready.wait()
    assert slot.buffer.tolist() == [1.0] * NUMEL


def test_changed_weights_are_fetched_again(rig: Any) -> None:
    own = rig(2, 2)
    own.through(own.units, "forward")
    unit = own.units[1]
    unit.state.weights.buffer.tensor.fill_(7.0)
    unit.version += 1
    assert own.use(unit, "forward").buffer.tolist() == [7.0] * NUMEL


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["forward", "backward", "inference", "update", "hold"]), st.integers(0, 5)),
        st.tuples(st.sampled_from(["prefetch", "release"]), st.just(0)),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS, slots=st.integers(2, 5))
def test_any_order_gives_the_right_content(unit_of: Any, operations: list[tuple[str, int]], slots: int) -> None:
    """A slot that was handed out holds the newest weights of its unit, whatever came before, until it is released."""
    failures = Failures()
    own = Rig([unit_of(order, failures) for order in range(6)], slots, failures, delay_ms=0.3)
    held: list[tuple[Slot, Unit]] = []
    try:
        for name, number in operations:
            unit = own.units[number]
            if name == "update":
                # The engine never updates a unit that is in use.
                if all(holder is not unit for _, holder in held):
                    own.update(unit)
            elif name == "hold":
                if len(held) < slots - 1:
                    held.append((own.use(unit, "backward"), unit))
            elif name == "release":
                if held:
                    own.window.release(held.pop(0)[0])
            elif name == "prefetch":
                own.window.prefetch(None, "forward")
            else:
                own.through([unit], name)  # type: ignore[arg-type]
            for slot, holder in held:
                assert slot.buffer.tolist() == [100.0 * holder.order + holder.version] * NUMEL
    finally:
        own.close()
    failures.raise_first()
