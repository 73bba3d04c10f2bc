"""Spare GPU memory is measured, shared out after step 3, and given back for a longer batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from contexts import context_of

from ds_slide.plan.sharing import TOLERANCES, Offer, share_out
from ds_slide.plan.spare import FRAGMENTATION, GPU_SHARES, Movable, Shape, Slots, Summable
from ds_slide.plan.step_model import Schedules
from ds_slide.report.statistics import StepRecorder, StepStatistics
from ds_slide.report.waits import Waits
from ds_slide.runtime.activations.activations import Activations
from ds_slide.runtime.activations.costs import BlockCosts
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.memory import spare_memory
from ds_slide.runtime.memory.gpu_room import Budget
from ds_slide.runtime.memory.spare_memory import FIRST_PAUSE, LOOKS, SpareMemory
from ds_slide.runtime.updates.passes import SAMPLES, Passes

TOTAL, RESIDENT, UNIT = 16_000, 2_000, 1_000
MARGIN = int(TOTAL * GPU_SHARES.margin)
TOKENS, BYTES_PER_TOKEN = 16, 100
UNITS = 12
SLOT, LEAST, SUM = 250, 2, 100


class Gpu:
    """A GPU on which a batch takes 100 bytes a token beside what is there all the time."""

    def __init__(self) -> None:
        self.on_gpu = RESIDENT
        self.most = RESIDENT
        self.retries = 0
        self.retries_of_a_batch = 0

    def memory(self) -> tuple[int, int]:
        return TOTAL - self.on_gpu, TOTAL

    def allocated(self) -> int:
        return self.on_gpu

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.on_gpu

    def allocation_retries(self) -> int:
        return self.retries

    def memory_rate(self) -> float | None:
        return None

    def release_cached(self) -> None: ...

    def compute(self, tokens: int) -> None:
        self.most = max(self.most, self.on_gpu + tokens * BYTES_PER_TOKEN)
        self.retries += self.retries_of_a_batch
        assert self.most <= TOTAL, "out of memory"


@dataclass
class Units:
    """States of units that take UNIT bytes each. `closed`: it is not the moment to move any. `window`: slots of SLOT
    bytes each, which are on the GPU already."""

    gpu: Gpu
    orders: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    closed: bool = False
    window: int = 0
    parkable: bool = False
    grows: bool = False
    leaving: int = 0

    def movable(self, forwards: int) -> list[Movable]:  # noqa: ARG002
        return [Movable(order, UNIT, 1 / UNITS) for order in range(UNITS) if order not in self.orders]

    def promoted(self) -> list[Movable]:
        return [Movable(order, UNIT, 1 / UNITS) for order in self.orders]

    def summable(self, forwards: int) -> list[Summable]:
        there = {*self.orders, *self.sums}
        left = [order for order in range(UNITS) if order not in there] if self.window and forwards > 1 else []
        return [Summable(order, SUM, 1 / UNITS, 1 / UNITS, forwards - 1) for order in left]

    def summed(self) -> list[Movable]:
        return [Movable(order, SUM, 0.0, streamed=False) for order in self.sums]

    def on_their_way(self) -> int:
        return self.leaving

    def slots(self, forwards: int) -> Slots:
        streamed = UNITS - len(self.orders)
        return Slots(self.window, min(self.window, LEAST), SLOT, streamed, 2 * forwards, self.grows)

    def may_park(self) -> bool:
        return self.parkable

    def park(self) -> int:
        return UNIT

    def give_up_slot(self) -> int:
        if self.window <= LEAST:
            return 0
        self.window -= 1
        return SLOT

    def give_up_sum(self) -> int:
        return SUM if self.sums and self.sums.pop() >= 0 else 0

    def may_move(self) -> bool:
        return not self.closed

    def move(self, orders: frozenset[int], slots: int | None = None, summed: frozenset[int] | None = None) -> bool:
        if self.closed:
            return False
        sums = sorted((frozenset(self.sums) if summed is None else summed) - orders)
        self.gpu.on_gpu += SUM * (len(sums) - len(self.sums))
        self.sums = sums
        streamed = UNITS - len(orders)
        after = min(max(self.window if slots is None else slots, LEAST if self.window else 0), streamed)
        self.gpu.on_gpu += UNIT * (len(orders) - len(self.orders)) + SLOT * (after - self.window)
        self.orders, self.window = sorted(orders), after
        return True


class Two(Ranks):
    """Two ranks, of which the other one has measured `other` bytes less."""

    def __init__(self, less: float) -> None:
        super().__init__(0, 2)
        self._less = less
        self.others_least = 1

    def least(self, values: Sequence[int]) -> list[int]:
        return [min(value, self.others_least) for value in values]

    def exchange(self, own: Any, what: str) -> list[Any]:  # noqa: ARG002
        return [own, replace(own, offer=replace(own.offer, room=own.offer.room - self._less))]


class Telling(Ranks):
    """One of two ranks, which measure one after the other."""

    def __init__(self, told: list[Any]) -> None:
        super().__init__(0, 2)
        self._told = told

    def least(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def exchange(self, own: Any, what: str) -> list[Any]:  # noqa: ARG002
        self._told.append(own)
        return self._told


class Updating:
    """Says when updates run."""

    found = Schedules("deferred", "deferred")

    def __init__(self) -> None:
        self.passes = Passes("auto")

    def schedules(self) -> Schedules:
        return self.found

    def products_s(self) -> None:
        """Nothing is updated by Muon."""


class OfGpu(Budget):
    """All that is on the GPU counts."""

    gpu: Any

    @property
    def placed(self) -> int:
        return int(self.gpu.on_gpu)


class Run:
    """A training. `stall`: seconds of a step of 1 s in which the GPU waits for the host."""

    def __init__(self, *, ranks: Ranks | None = None, stall: float = 0.5, limit: int | None = None) -> None:
        self.gpu = Gpu()
        self.units = Units(self.gpu)
        self.updating = Updating()
        device = Device(torch.device("cpu"))
        lanes: dict[str, dict[str, float | int]] = {"compute": {"busy_s": 1 - stall, "bytes": 0}}
        self.recorder = StepRecorder(device, Waits(device))
        self.recorder.latest = StepStatistics(1, 1.0, 1.0, "compute", lanes, {})
        context = context_of(device, ranks=ranks or Ranks(), recorder=self.recorder)
        self.spare = SpareMemory(context, Activations(context, []), OfGpu(self.gpu, limit), self.updating)
        self.spare.room.states = self.units

    def forward(self, batch: Sequence[int] = (1, TOKENS)) -> None:
        self.spare.begin_forward((), {"input_ids": torch.zeros(*batch, dtype=torch.long)})
        self.gpu.compute(batch[0] * batch[1])
        self.spare.end_forward()

    def step(self, *shapes: Sequence[int]) -> None:
        for shape in shapes or [(1, TOKENS)]:
            self.forward(shape)
            self.units.closed = True  # gradients wait
        self.units.closed = False
        self.spare.end_step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def test_states_take_what_the_measured_peak_and_the_margin_leave() -> None:
    run = Run()
    run.gpu.most = TOTAL  # of the model's loading, which is no part of a step
    run.steps(LOOKS[0] - 1)
    assert run.units.orders == []
    run.step()
    room = TOTAL - MARGIN - RESIDENT - TOKENS * BYTES_PER_TOKEN
    assert run.units.orders == list(range(room // UNIT))
    before = list(run.units.orders)
    run.steps(10)
    assert run.units.orders == before and run.gpu.most <= TOTAL - MARGIN


def test_times_of_passes_are_forgotten_when_states_move() -> None:
    """They are of steps that used memory in another way."""
    run, wanted = Run(), True
    run.steps(LOOKS[0] - 1)
    times = run.updating.passes.times
    for two in (False, True):
        for _ in range(SAMPLES):
            times.note(2.0 if two else 1.0, two=two)
    assert not times.choose(now=False, wanted=wanted)
    run.step()
    assert run.units.orders and times.choose(now=False, wanted=wanted)


@pytest.mark.parametrize(("alone", "counted"), [(0.15, 0.15), (0.9, 0.58), (None, 0.58)])
def test_products_of_muon_count_as_they_are_alone(alone: float | None, counted: float) -> None:
    """Beside the model each of them waits for processors, and its lane is busy for longer."""
    lanes: Any = {"compute": {"busy_s": 0.7}, "update": {"busy_s": 0.8}, "products": {"busy_s": 0.58}}
    statistics = StepStatistics(1, 1.0, 1.0, "update", lanes, {})
    step = spare_memory._measured(statistics, Updating.found, 0, 1, alone)
    assert step.lanes["products"] == counted
    del lanes["products"]
    assert "products" not in spare_memory._measured(statistics, Updating.found, 0, 1, alone).lanes


def test_slots_beyond_the_least_give_way_to_states() -> None:
    """And do not come back when states go back to make room."""
    run = Run()
    other, run.units.window = 4_000, 10
    run.gpu.on_gpu += other + run.units.window * SLOT
    run.steps(LOOKS[0])
    room = TOTAL - MARGIN - RESIDENT - other - TOKENS * BYTES_PER_TOKEN
    promoted = (room - LEAST * SLOT) // UNIT
    assert promoted > (room - 10 * SLOT) // UNIT
    slots = (room - promoted * UNIT) // SLOT
    assert (len(run.units.orders), run.units.window) == (promoted, slots)
    run.forward((4, TOKENS))
    left = room - 3 * TOKENS * BYTES_PER_TOKEN
    assert (len(run.units.orders), run.units.window) == ((left - slots * SLOT) // UNIT, slots)


def test_slots_come_where_fetches_take_longest_and_go_again() -> None:
    run = Run(stall=0.5)
    run.units.window, run.units.grows = 5, True
    run.gpu.on_gpu += 5 * SLOT + TOTAL - MARGIN - RESIDENT - TOKENS * BYTES_PER_TOKEN - 11 * SLOT
    run.recorder.latest.lanes["h2d"] = {"busy_s": 1.0, "bytes": 0}
    run.steps(LOOKS[0])
    assert (run.units.orders, run.units.window) == ([], 11)
    run.forward((1, 2 * TOKENS))
    assert run.units.window < 11


def test_sums_come_where_gradients_take_longest_and_go_again() -> None:
    run, need = Run(stall=0.9), TOKENS * BYTES_PER_TOKEN
    run.units.window = 5
    run.gpu.on_gpu += int(TOTAL - MARGIN - RESIDENT - (1 + TOLERANCES.headroom) * need - 4 * SUM)
    run.recorder.latest.lanes["update"] = {"busy_s": 0.95, "bytes": 0, "holding_s": 0.8}
    for _ in range(LOOKS[0]):
        run.step(*4 * [(1, TOKENS)])
    assert (run.units.orders, run.units.sums) == ([], [0, 1, 2, 3])
    run.forward((1, 2 * TOKENS))
    assert run.units.sums == []


def test_slots_go_where_states_do_not_suffice() -> None:
    run = Run(stall=0.0)
    run.units.window = 10
    run.gpu.on_gpu += TOTAL - MARGIN - RESIDENT - TOKENS * BYTES_PER_TOKEN
    run.steps(LOOKS[0])
    run.forward((1, TOKENS + 1))
    growth = (TOKENS + 1) ** 2 / TOKENS**2
    assert run.units.window == 10 - -(-(growth - 1) * TOKENS * BYTES_PER_TOKEN // SLOT)
    run.forward((1, 2 * TOKENS))
    assert run.units.window == LEAST
    run.forward((1, 2 * TOKENS))


@pytest.mark.parametrize("square", [0.0, None], ids=["linear", "not known"])
def test_a_longer_batch_takes_no_states_for_a_need_that_it_cannot_have(square: float | None) -> None:
    """Memory that has been seen to hold nothing for each pair of tokens grows with their number."""
    run = Run()
    run.spare.activations.costs.square_bytes = lambda _: square  # type: ignore[method-assign]
    run.steps(LOOKS[0])
    before = len(run.units.orders)
    run.forward((1, 2 * TOKENS))
    needed = TOKENS * BYTES_PER_TOKEN * (2 if square is not None else 4)
    left = (TOTAL - MARGIN - RESIDENT - needed) // UNIT
    assert len(run.units.orders) == min(before, left) < before


def test_states_fill_what_not_even_another_batch_would_need() -> None:
    run = Run(stall=0.0)
    run.steps(10)
    assert run.units.orders == list(range((TOTAL - MARGIN - RESIDENT - 2 * TOKENS * BYTES_PER_TOKEN) // UNIT))


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_that_cannot_go_back_leave_room_for_a_batch_twice_as_long(ranks: int) -> None:
    run = Run(stall=0.0, ranks=Two(0.0) if ranks == 2 else None)
    for _ in range(10):
        run.step(*[(1, TOKENS)] * (3 - ranks))
    filled = list(range((TOTAL - MARGIN - RESIDENT - 2 * TOKENS * BYTES_PER_TOKEN) // UNIT))
    assert run.units.orders == filled
    run.units.closed = True
    run.forward((1, 2 * TOKENS))
    assert run.units.orders == filled


def test_nothing_is_moved_for_nothing() -> None:
    run = Run(stall=0.0)
    run.gpu.memory_rate = lambda: 5e4  # an update of one unit takes 0.04 of 1 s
    run.steps(10)
    assert run.units.orders == []


def test_the_limit_is_hard() -> None:
    run = Run(limit=RESIDENT + 2 * UNIT + 1)
    run.steps(10)
    assert run.units.orders == [0, 1]


@pytest.mark.parametrize("with_gradient", [True, False], ids=["training", "evaluation"])
def test_a_longer_batch_gets_the_memory_of_as_many_states_as_it_needs(with_gradient: bool) -> None:
    run = Run()
    run.steps(LOOKS[0])
    moved = len(run.units.orders)
    with torch.set_grad_enabled(with_gradient):
        run.forward((4, TOKENS))
    needed = 4 * TOKENS * BYTES_PER_TOKEN
    assert run.units.orders == list(range((TOTAL - MARGIN - RESIDENT - needed) // UNIT))
    assert len(run.units.orders) < moved


@pytest.mark.parametrize("with_gradient", [True, False], ids=["training", "evaluation"])
def test_recordings_go_before_states(with_gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run, recordings = Run(), 3 * UNIT
    run.steps(LOOKS[0])
    moved = run.units.orders
    run.units.move(frozenset(moved[:-3]))
    run.gpu.on_gpu += recordings

    def give_up() -> int:
        nonlocal recordings
        freed, recordings = recordings, 0
        run.gpu.on_gpu -= freed
        return freed

    monkeypatch.setattr(run.spare.activations.captures, "give_up", give_up)
    with torch.set_grad_enabled(with_gradient):
        run.forward((2, TOKENS))
    assert recordings == 0
    assert run.units.orders == moved[:-3]


def test_states_go_back_once_for_a_batch() -> None:
    """With what the allocator cannot use of a batch that takes half of the GPU."""
    run = Run()
    run.steps(LOOKS[0])
    run.forward((5, TOKENS))
    needed = 5 * TOKENS * BYTES_PER_TOKEN
    assert FRAGMENTATION * needed > MARGIN
    left = list(range(int((TOTAL - RESIDENT - (1 + FRAGMENTATION) * needed) // UNIT)))
    assert run.units.orders == left
    run.forward((5, TOKENS))
    assert run.units.orders == left


def test_states_that_went_back_for_an_evaluation_come_again() -> None:
    """And more rarely where that happens again and again."""
    run = Run()
    run.steps(LOOKS[1] + 1)
    most, pauses = len(run.units.orders), list[int]()
    for _ in range(4):
        with torch.no_grad():
            run.forward((4, TOKENS))
        assert len(run.units.orders) < most
        steps = 0
        while len(run.units.orders) < most:
            run.step()
            steps += 1
        pauses.append(steps)
    assert pauses == [FIRST_PAUSE * 2**number for number in range(4)]


def test_states_do_not_come_again_where_batches_need_their_place() -> None:
    run = Run()
    run.steps(LOOKS[1] + 1)
    run.step((1, 2 * TOKENS))
    run.steps(FIRST_PAUSE + 1)
    promoted = list(run.units.orders)
    for _ in range(3):
        run.step((1, 2 * TOKENS))
        run.steps(2 * FIRST_PAUSE)
        assert run.units.orders == promoted


@pytest.mark.parametrize(
    ("lengths", "headroom"), [((16, 16), TOLERANCES.headroom), ((16, 8), TOLERANCES.headroom_of_varying)]
)
def test_in_an_accumulation_states_stay_and_leave_room_for_a_longer_batch(
    lengths: Sequence[int], headroom: float
) -> None:
    run = Run()
    for _ in range(LOOKS[0]):
        run.step(*((1, length) for length in lengths))
    need = TOKENS * BYTES_PER_TOKEN
    assert run.units.orders == list(range(int((TOTAL - MARGIN - RESIDENT - need * (1 + headroom)) // UNIT)))
    moved, run.units.closed = list(run.units.orders), True
    run.forward((1, int(TOKENS * (1 + headroom))))
    assert run.units.orders == moved


def test_gradients_on_their_way_to_host_memory_leave_room_for_the_next_micro_batch() -> None:
    """A batch's need, which begins with a step, counts them already. An evaluation has been measured without."""
    run = Run()
    run.steps(LOOKS[1] + 1)
    room = run.spare.room
    before = [room.of(None), room.of(None, with_gradient=False)]
    run.gpu.on_gpu += 300
    assert room.of(None) == before[0] - 300
    run.units.leaving = 300
    assert [room.of(None), room.of(None, with_gradient=False)] == [before[0], before[1] - 300]


def test_a_longer_batch_is_known_once_it_has_run() -> None:
    """Its first prediction is for attention that grows with the square; the next one of its length is measured."""
    run = Run()
    run.steps(LOOKS[0])
    run.step((1, 2 * TOKENS))
    left = list(run.units.orders)
    assert left == list(range((TOTAL - MARGIN - RESIDENT - 4 * TOKENS * BYTES_PER_TOKEN) // UNIT))
    need = run.spare.need
    assert need is not None and need.nbytes < 4 * TOKENS * BYTES_PER_TOKEN
    run.step((1, 2 * TOKENS))
    assert run.units.orders == left


def test_the_margin_grows_where_torch_finds_no_room() -> None:
    run = Run()
    run.steps(LOOKS[1])
    run.gpu.retries += 5  # for what has just been decided
    run.steps(3)
    assert run.spare.room.margin == MARGIN
    margins = [run.spare.room.margin]
    run.gpu.retries_of_a_batch = 1
    for _ in range(20):
        run.step()
        margins.append(run.spare.room.margin)
    assert margins[1] > MARGIN and margins == sorted(margins) and margins[-1] == 4 * MARGIN


def test_ranks_decide_by_the_one_with_the_least_room() -> None:
    run = Run(ranks=Two(2_500.0))
    run.steps(LOOKS[0])
    need = TOKENS * BYTES_PER_TOKEN
    room = TOTAL - MARGIN - RESIDENT - need - TOLERANCES.headroom * need - 2_500
    assert run.units.orders == list(range(int(room // UNIT)))
    before = list(run.units.orders)
    run.forward((2, TOKENS))  # on this rank alone: nothing that the other one would have to take part in
    assert run.units.orders == before


def test_a_step_is_judged_by_the_updates_that_ran_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has queued others by the time, perhaps in another number of passes."""
    run, judged = Run(), list[tuple[str, float]]()

    def share(offer: Offer) -> Any:
        judged.append((offer.step.schedule, offer.step.holding_s))
        return share_out(offer)

    monkeypatch.setattr(spare_memory, "share_out", share)
    run.updating.found = Schedules("deferred", "two passes")
    assert run.recorder.latest is not None
    run.recorder.latest.lanes["update"] = {"busy_s": 0.3, "bytes": 0, "holding_s": 0.125}
    run.steps(LOOKS[0])
    assert set(judged) == {("deferred", 0.125)} and run.spare.activations.keeps_first


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_alone_decides_nothing_when_its_recordings_have_come(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks' batches have other shapes. A decision waits for all of them."""
    run = Run(ranks=Two(0.0) if ranks == 2 else None)
    run.steps(LOOKS[-1] + 1)
    monkeypatch.setattr(run.spare.activations.captures, "end_step", lambda **_: True)
    run.step()
    assert max(run.spare._looks.coming) == (run.spare._looks.step + 2 if ranks == 1 else LOOKS[-1])


@pytest.mark.parametrize("others", [0, 1])
def test_recordings_are_expected_on_all_ranks_or_on_none(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that expects some offers all of its room to the states of all ranks."""
    run = Run(ranks=(ranks := Two(0.0)))
    ranks.others_least = others
    captures = run.spare.activations.captures

    def expect(*_: Any, **__: Any) -> float:
        captures.are_expected = True
        return 0.0

    monkeypatch.setattr(captures, "expect", expect)
    run.steps(LOOKS[0])
    assert captures.are_expected == bool(others)


def test_ranks_with_other_gpus_decide_alike() -> None:
    """By the memory of one of them: each by its own would move other states, in a collective."""
    told: list[Any] = []
    for rate in (1e3, 1e12):
        run = Run(ranks=Telling(told))
        run.gpu.memory_rate = lambda rate=rate: rate  # type: ignore[misc]
        run.steps(LOOKS[0])
        assert run.units.orders == []  # as the first one decides, on whose GPU an update takes 2 s


def test_what_others_take_is_counted_once() -> None:
    """Another engine comes: what it has on the GPU is no part of what a batch needs."""
    run = Run(stall=0.0)
    run.steps(LOOKS[1] + 2)
    run.gpu.on_gpu += UNIT
    run.steps(3)
    assert run.spare.need is not None and run.spare.need.nbytes == TOKENS * BYTES_PER_TOKEN


@pytest.mark.parametrize("after", [1, 2, LOOKS[1] + 2])
def test_the_peak_of_others_is_no_need_of_a_batch(after: int) -> None:
    """A checkpoint is saved, an evaluation runs, another engine trains: between two steps."""
    run = Run(stall=0.0)
    run.steps(after)
    run.gpu.most = max(run.gpu.most, RESIDENT + 3 * TOKENS * BYTES_PER_TOKEN)
    with torch.no_grad():
        run.forward((1, TOKENS))
    run.steps(LOOKS[1] + 1)
    assert run.spare.need is not None and run.spare.need.nbytes == TOKENS * BYTES_PER_TOKEN
    run.gpu.compute(2 * TOKENS)  # in the middle of a step it is one
    run.spare.end_step()
    assert run.spare.need.nbytes == 2 * TOKENS * BYTES_PER_TOKEN


def test_a_step_that_records_is_no_need_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peak has the recordings, and what they are about to replace."""
    run, recordings = Run(stall=0.0), 0
    captures = run.spare.activations.captures
    monkeypatch.setattr(type(captures), "nbytes", property(lambda _: recordings))
    run.steps(LOOKS[1] + 2)
    forgotten = list[int]()
    monkeypatch.setattr(run.updating.passes.times, "forget", lambda: forgotten.append(recordings))
    run.forward()
    recordings = UNIT
    run.gpu.on_gpu += recordings
    run.gpu.compute(2 * TOKENS)
    run.spare.end_step()
    assert forgotten == [UNIT]  # the times of steps without recordings
    run.steps(3)
    assert run.spare.need.nbytes == TOKENS * BYTES_PER_TOKEN and forgotten == [UNIT]
    run.gpu.compute(2 * TOKENS)  # in a later step it is one
    run.spare.end_step()
    assert run.spare.need.nbytes == 2 * TOKENS * BYTES_PER_TOKEN


def test_skipped_steps_are_no_accumulation() -> None:
    """fp16 begins with losses that are scaled too far."""
    run = Run()
    run.gpu.on_gpu += 200
    for _ in range(3):
        run.forward()  # and a backward, whose gradients nobody applies
    run.steps(LOOKS[0])
    room = TOTAL - MARGIN - RESIDENT - 200 - TOKENS * BYTES_PER_TOKEN
    assert len(run.units.orders) == room // UNIT > (room - TOLERANCES.headroom * TOKENS * BYTES_PER_TOKEN) // UNIT


def test_a_second_look_takes_back_what_the_first_has_given_too_much() -> None:
    run = Run()
    run.steps(LOOKS[0] + 1)
    run.gpu.on_gpu += 3 * UNIT  # of another engine, say
    run.steps(LOOKS[1] - LOOKS[0] - 1)
    moved = len(run.units.orders)
    assert RESIDENT + 3 * UNIT + moved * UNIT + TOKENS * BYTES_PER_TOKEN <= TOTAL - MARGIN
    assert moved == (TOTAL - MARGIN - RESIDENT - TOKENS * BYTES_PER_TOKEN) // UNIT - 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_that_make_room_in_a_step_leave_as_much_free(ranks: int) -> None:
    """Several ranks, which have to move states together, have them make room again, and give up no more each time."""
    run = Run(ranks=Two(0) if ranks == 2 else None)
    run.steps(LOOKS[1] + 1)
    run.units.parkable = True
    most, reserves = len(run.units.orders), list[float]()
    for _ in range(4):
        run.forward()
        assert run.spare.shortage.make_room()
        run.spare.end_step()
        reserves.append(run.spare.room.reserve)
    if ranks == 2:
        assert reserves == [0.0] * 4 and len(run.units.orders) == most
    else:
        assert reserves[0] >= UNIT and len(run.units.orders) < most


def test_states_that_make_room_for_an_evaluation_leave_nothing_free() -> None:
    run = Run()
    run.steps(LOOKS[1] + 1)
    run.units.parkable = True
    with torch.no_grad():
        run.spare.begin_forward((), {"input_ids": torch.zeros(1, TOKENS, dtype=torch.long)})
        assert run.spare.shortage.make_room()
        run.spare.end_forward(completed=True)
    margin = run.spare.room.margin
    run.gpu.retries += 3
    run.steps(3)
    assert run.spare.room.reserve == 0.0 and run.spare.room.margin == margin


def test_a_forward_that_ended_with_an_exception_says_nothing_of_evaluations() -> None:
    run = Run()
    run.steps(LOOKS[1] + 1)
    need = run.spare.need
    for completed in (False, True):
        with torch.no_grad():
            run.spare.begin_forward((), {"input_ids": torch.zeros(2, TOKENS, dtype=torch.long)})
            run.gpu.compute(4)
            run.spare.end_forward(completed=completed)
        known = need.at(Shape(2 * TOKENS, TOKENS), with_gradient=False)
        assert known == (4 * BYTES_PER_TOKEN if completed else 2 * TOKENS * BYTES_PER_TOKEN)


def test_two_lengths_of_the_first_steps_tell_what_a_longer_batch_has_no_more_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As gradients of weights, which each batch of these has 500 bytes of."""
    monkeypatch.setattr(BlockCosts, "gradient_bytes", 1_000)
    run = Run()
    run.spare.activations.costs.square_bytes = lambda _: 0.0  # type: ignore[method-assign]
    compute = run.gpu.compute
    monkeypatch.setattr(run.gpu, "compute", lambda tokens: compute(tokens + 5))
    for tokens in (TOKENS, TOKENS, 2 * TOKENS, TOKENS):
        run.step((1, tokens))
    longer = run.spare.need.at(Shape(4 * TOKENS, TOKENS))
    assert longer == 4 * TOKENS * BYTES_PER_TOKEN + 500
