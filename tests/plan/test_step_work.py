"""The schedules of a step, by plans and ceilings that make the answer known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ds_slide.compression.codec import Identity
from ds_slide.model.layout import ParameterInfo, build_layout
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.low_precision import STATE_FORMATS
from ds_slide.plan.ceilings import Ceilings
from ds_slide.plan.memory import Plan
from ds_slide.plan.needs import Needs, Placement, SsdNeeds, UnitSize
from ds_slide.plan.operations import Operation
from ds_slide.plan.rates import HOST_OPERATION_S, Rates
from ds_slide.plan.step_model import PASS_SHARE, Change, Schedule, Step, all_schedules, scheduled
from ds_slide.plan.step_work import BESIDE_COPIES, update_bytes, work_of
from ds_slide.plan.trace import Segment, StepTrace
from ds_slide.store.state_buffers import optimizer_buffers

torch = pytest.importorskip("torch")

NUMEL, BLOCKS = 1 << 20, 8
NOTHING = Operation("other", 0, 0)
SPECS = optimizer_buffers(torch.bfloat16, ADAMW, STATE_FORMATS["fp32"])


def unit(index: int, ranks: int = 1) -> UnitSize:
    layout = build_layout([ParameterInfo(f"{index}.weight", (NUMEL,), NUMEL, 0)], ranks)
    kind: Any = "outer" if index == 0 else "block"
    return UnitSize(str(index), layout, Identity(layout, torch.bfloat16), kind, SPECS, 2)


UNITS = [unit(index) for index in range(BLOCKS + 1)]


def trace(forward_s: float, backward_s: float, launches: int = 0) -> StepTrace:
    """So long in each block. Products run at 1 TFLOP/s. `launches`: of the host in each block, beside its product's."""

    def segment(index: int, seconds: float) -> Segment:
        return Segment(index, Counter({Operation("product", int(seconds * 1e12), 0): 1, NOTHING: launches}))

    blocks = range(1, BLOCKS + 1)
    forward = tuple(segment(index, forward_s) for index in blocks)
    backward = tuple(segment(index, backward_s) for index in reversed(blocks))
    return StepTrace(forward, (*backward, Segment(0)), 0, 0)


def rates(update: float = 1e3, link: float = 1e3, disk: float = 1e3) -> Rates:
    """GB/s; `update`: beside copies."""
    gpu = {
        "name": "a GPU",
        "memory_bytes": 1,
        "product_tflop_s": {"8192x8192x8192": 1.0},
        "copy_gb_s": 1e6,
        "h2d_gb_s": link,
        "d2h_gb_s": link,
        "both_ways_gb_s": link,
    }
    cpu = {
        "name": "a CPU",
        "memory_bytes": 1,
        "update_gb_s": update / BESIDE_COPIES,
        "update_threads": 1,
        "copy_gb_s": 1.0,
    }
    one = {"path": "/", "read_gb_s": disk, "write_gb_s": disk, "mixed_gb_s": disk, "direct": True, "backend": "threads"}
    return Rates.of(Ceilings.model_validate({"source": "", "cpu": cpu, "gpu": gpu, "disks": [one]}), on_gpu=True)


NEEDS = Needs(held_bytes=2, window=BLOCKS, ring=0)
PASSES: tuple[Schedule, ...] = ("deferred", "two passes")
UPDATE_GB = (BLOCKS + 1) * 26 * NUMEL / 1e9


def plan(needs: Needs = NEEDS, placement: Placement | None = None) -> Plan:
    return Plan.of(UNITS, needs, placement or Placement(window=needs.window))


def schedules(made: Plan, work: StepTrace, found: Rates, micro_batches: int = 1) -> dict[Schedule, Step]:
    return all_schedules(work_of(made, work, found, micro_batches, two=True))


def step(
    made: Plan, work: StepTrace, found: Rates, micro_batches: int = 1, *, two: bool = True, below_limit: bool = False
) -> Step:
    return scheduled(work_of(made, work, found, micro_batches, two=two), below_limit=below_limit)


def seconds(found: Rates, work: StepTrace, *, micro_batches: int = 1, **placed: Any) -> dict[str, float]:
    made = plan(placement=Placement(window=placed.pop("window", BLOCKS), **placed))
    return {name: each.step_s for name, each in schedules(made, work, found, micro_batches).items()}


def test_bytes_of_an_update() -> None:
    assert update_bytes(UNITS[1]) == 26 * NUMEL


def test_matrices_pass_the_link_and_their_products_stay_with_the_gpu() -> None:
    """Products of 0.05 s for each of 8 blocks, beside a forward of 0.08 s and a backward of 0.16 s. An update of states
    in host memory takes 14 bytes an element up beside the new weight's 2; on the GPU it takes none."""
    matrices = [replace(each, largest_matrix=NUMEL, product_flop=int(0.05e12)) for each in UNITS[1:]]
    units, link = [UNITS[0], *matrices], 1.0  # GB/s

    def found(on_gpu: frozenset[int]) -> Step:
        placement = Placement(on_gpu=on_gpu, window=BLOCKS)
        return step(Plan.of(units, NEEDS, placement), trace(0.01, 0.02), rates(link=link), two=False)

    blocks = frozenset(range(1, BLOCKS + 1))
    host, some, gpu = found(frozenset()), found(frozenset((1, 2, 3))), found(blocks)
    assert host.lanes["update"] == pytest.approx(BLOCKS * 16 * NUMEL / 1e9, rel=1e-3)
    assert some.lanes["update"] == pytest.approx(5 / 8 * host.lanes["update"], rel=1e-3)
    assert gpu.lanes["update"] < 1e-3
    for each in (host, some, gpu):
        assert each.lanes["compute"] == pytest.approx(0.24 + 0.4, rel=1e-3)
        assert each.step_s >= 0.24 + 0.4
    assert gpu.step_s == pytest.approx(0.64, rel=0.02)


def test_where_the_gpu_is_the_bound_nothing_else_shows() -> None:
    assert seconds(rates(), trace(0.01, 0.02))["under backward"] == pytest.approx(0.24, rel=0.05)


def test_deferred_updates_run_under_the_forward_alone() -> None:
    # Updates of 0.20 s beside a forward of 0.08 and a backward of 0.16.
    slow, work = rates(update=UPDATE_GB / 0.20), trace(0.01, 0.02)
    found = seconds(slow, work)
    assert found["deferred"] == pytest.approx(0.16 + 0.20, rel=0.1)
    # The outer module's gradient is final last and its weights are needed first, behind an update that has begun.
    assert found["under backward"] == pytest.approx(0.24 + 2.5 * 0.20 / (BLOCKS + 1), rel=0.05)
    # 18 of 26 bytes under the forward, and 18 under the backward.
    assert found["two passes"] == pytest.approx(0.16 + 0.20 * PASS_SHARE, rel=0.12)
    # Without undo logs nothing is updated ahead.
    assert found["speculative"] == found["deferred"]


def test_updates_ahead_take_longer_with_undo_logs_than_with_spare_states() -> None:
    slow, work = rates(update=UPDATE_GB / 0.30), trace(0.01, 0.02)
    found = seconds(slow, work)
    ahead = seconds(slow, work, undo_logs=frozenset(range(1, BLOCKS + 1)))["speculative"]
    spare = seconds(slow, work, spare_states=frozenset(range(1, BLOCKS + 1)))["speculative"]
    assert found["under backward"] <= spare < ahead <= found["two passes"] < found["deferred"]


def test_backward_waits_for_a_buffer_that_an_update_gives_back() -> None:
    """Updates of 0.033 s behind backwards of 0.005 s: with two buffers the last gradient comes down behind the seventh
    update of nine, and a forward of 0.24 s waits for the last one."""

    def under_backward(ring: int) -> float:
        needs = replace(NEEDS, held_bytes=0, ring=ring)
        slow, work = rates(update=UPDATE_GB / 0.30), trace(0.03, 0.005)
        return schedules(plan(needs), work, slow)["under backward"].step_s

    assert under_backward(BLOCKS + 1) == pytest.approx(0.04 + 2.5 * 0.0333 + 0.24, rel=0.1)
    assert under_backward(2) == pytest.approx(0.005 + 9 * 0.0333 + 0.24, rel=0.1)
    by_ring = [under_backward(ring) for ring in range(2, BLOCKS + 2)]
    assert by_ring == sorted(by_ring, reverse=True) and by_ring[0] > 1.2 * by_ring[-1]


def test_second_passes_begin_under_the_forward_when_the_first_have_ended() -> None:
    # 0.15 s of each beside a forward of 0.24, which waits for the first two of nine units, and a backward of 0.08.
    found = seconds(rates(update=UPDATE_GB / 0.20), trace(0.03, 0.01))["two passes"]
    assert found == pytest.approx(0.32 + 0.15 * 2 / (BLOCKS + 1), rel=0.02)


@pytest.mark.parametrize("window", [3, 6])
def test_more_slots_save_what_forwards_and_backwards_wait_for(window: int) -> None:
    """8 micro-batches, whose forwards wait for fetches and whose backwards hide them."""
    work, slow = trace(0.01, 0.03), rates(link=2 * NUMEL / 1e9 / 0.02)

    def of(slots: int) -> Step:
        return schedules(plan(placement=Placement(window=slots)), work, slow, 8)["deferred"]

    few, more = of(2), of(window)
    change = Change(fetches=more.lanes["h2d"] / few.lanes["h2d"])
    assert few.after(Change()) == pytest.approx(few.step_s)
    assert few.after(change) == pytest.approx(more.step_s, rel=0.06) and more.step_s < 0.97 * few.step_s


def test_sums_on_the_gpu_go_down_once() -> None:
    """With a link and a CPU that take longest."""
    slow, work = rates(update=UPDATE_GB / 0.30, link=(BLOCKS + 1) * 2 * NUMEL / 1e9 / 0.25), trace(0.01, 0.02)

    def with_sums(*units: int) -> Step:
        made = plan(placement=Placement(window=BLOCKS, summed=frozenset(units)))
        return schedules(made, work, slow, 4)["deferred"]

    none, every, some = with_sums(), with_sums(*range(BLOCKS + 1)), with_sums(1, 2, 3)
    assert (none.lanes["d2h"], every.lanes["d2h"]) == (pytest.approx(1.0), pytest.approx(0.25))
    assert none.down_s == none.lanes["d2h"] and every.down_s == every.lanes["d2h"]
    assert every.holding_s == 0.0 and every.lanes["update"] == pytest.approx(0.30)
    assert some.holding_s == pytest.approx(none.holding_s * (BLOCKS - 2) / (BLOCKS + 1))
    share = 3 / (BLOCKS + 1)
    expected = replace(none, two=False).after(Change(summed_share=share, down_share=0.75 * share))
    assert some.step_s == pytest.approx(expected, rel=0.05) and every.step_s < some.step_s < none.step_s


@pytest.mark.parametrize("summed", [0, 3, 7, BLOCKS + 1])
def test_sums_on_the_gpu_make_room_for_second_passes(summed: int) -> None:
    """Updates of 0.45 s beside backwards of 0.16 s, in a step of four micro-batches: a change that adds up gradients on
    the GPU is predicted with the passes that the engine then chooses."""
    slow, work = rates(update=UPDATE_GB / 0.45), trace(0.01, 0.02)

    def with_sums(count: int) -> Step:
        made = plan(placement=Placement(window=BLOCKS, summed=frozenset(range(BLOCKS, BLOCKS - count, -1))))
        return step(made, work, slow, micro_batches=4)

    none, some = with_sums(0), with_sums(summed)
    assert none.schedule == "deferred" and some.schedule == ("two passes" if summed else "deferred")
    share = summed / (BLOCKS + 1)
    predicted = none.after(Change(summed_share=share, down_share=0.75 * share))
    assert predicted == pytest.approx(some.step_s, rel=0.05)


def test_gradients_of_later_micro_batches_are_added_up_under_their_backwards() -> None:
    """6 bytes a parameter and micro-batch of the update's lane: no forward waits for them, and a backward that is
    shorter ends with them."""
    slow, added = rates(update=UPDATE_GB / 0.26), 0.06

    def deferred(work: StepTrace, micro_batches: int) -> Step:
        return schedules(plan(), work, slow, micro_batches)["deferred"]

    one, four = deferred(trace(0.01, 0.02), 1), deferred(trace(0.01, 0.02), 4)
    assert (one.holding_s, four.holding_s) == (0.0, pytest.approx(3 * added))
    assert four.lanes["update"] - one.lanes["update"] == pytest.approx(3 * added)
    assert four.step_s - one.step_s == pytest.approx(3 * (0.08 + 0.16))
    one, four = (deferred(trace(0.01, 0.005), count) for count in (1, 4))
    assert four.step_s - one.step_s == pytest.approx(3 * (0.08 + added))


@pytest.mark.parametrize(
    ("update_s", "schedule"),
    [(0.06, "deferred"), (0.20, "two passes"), (0.30, "two passes"), (0.45, "deferred")],
)
def test_the_schedule_is_the_one_that_the_engine_chooses(update_s: float, schedule: str) -> None:
    """Beside a forward of 0.08 s, which the host takes 0.072 s to launch, and a backward of 0.16 s."""

    def chosen(placement: Placement, **options: Any) -> Step:
        work, found = trace(0.01, 0.02, int(0.009 / HOST_OPERATION_S)), rates(update=UPDATE_GB / update_s)
        return step(plan(placement=placement), work, found, **options)

    without, logs = Placement(window=BLOCKS), Placement(window=BLOCKS, undo_logs=frozenset(range(1, BLOCKS + 1)))
    assert chosen(without).schedule == chosen(without, below_limit=True).schedule == schedule
    assert chosen(without, two=False).schedule == "deferred" and chosen(without).why
    ahead = "deferred" if update_s < 0.08 else "speculative"
    assert chosen(logs, below_limit=True).schedule == ahead and chosen(logs).schedule == schedule


def test_a_forward_is_as_long_as_the_host_has_it_that_chooses_two_passes() -> None:
    """Where it does not wait for updates it is ahead of the GPU: to its clock these are most of a forward. 3 B with
    32,768 tokens and 3 B in 80 GB had two passes where the GPU's forward would have hidden one
    (benchmarks/results/2026-11-25_nvidia-h100_forecast.md)."""
    slow = rates(update=UPDATE_GB / 0.060)
    for launches, schedule in ((0, "two passes"), (int(0.009 / HOST_OPERATION_S), "deferred")):
        work = trace(0.01, 0.02, launches)
        assert step(plan(), work, slow).schedule == schedule


def test_a_backward_of_blocks_with_states_on_the_gpu_hides_no_second_pass() -> None:
    # It comes last, after updates of 0.30 s in all, which are those of half of the blocks or of all units.
    found = []
    for promoted in (frozenset(range(BLOCKS // 2 + 1)), frozenset[int]()):
        made = plan(placement=Placement(window=BLOCKS, promoted=promoted))
        slow, work = rates(update=(1 - len(promoted) / len(UNITS)) * UPDATE_GB / 0.30), trace(0.01, 0.02)
        chosen = step(made, work, slow)
        assert chosen.step_s == min(schedules(made, work, slow)[each].step_s for each in PASSES)
        found.append(chosen.schedule)
    assert found == ["deferred", "two passes"]


def test_a_window_that_holds_all_blocks_saves_their_second_fetch() -> None:
    link = rates(link=2 * NUMEL / 1e9)  # a second for each unit
    made = [plan(placement=Placement(window=window)) for window in (BLOCKS, 3)]
    found = [schedules(each, trace(0.1, 0.1), link, 2)["deferred"].lanes["h2d"] for each in made]
    # In each backward five blocks are not there any more, nor in the forward of the second micro-batch.
    assert found == pytest.approx([BLOCKS + 1, BLOCKS + 1 + 3 * 5])


@pytest.mark.parametrize("shares", [True, False])
def test_ranks_that_share_weights_read_the_parts_of_all(shares: bool) -> None:
    units, needs = [unit(order, 2) for order in range(BLOCKS + 1)], replace(NEEDS, world_size=2, shares_weights=shares)
    made, link = Plan.of(units, needs, Placement(window=BLOCKS)), rates(link=2 * NUMEL / 1e9)
    lanes = schedules(made, trace(0.1, 0.1), link)["deferred"].lanes
    whole = BLOCKS + 1
    assert [lanes["h2d"], lanes["d2h"]] == pytest.approx([whole if shares else whole / 2, whole / 2])


def test_a_slow_disk_is_the_bound() -> None:
    needs = replace(NEEDS, ssd=SsdNeeds(True, True, NUMEL, chunk_buffers=2))  # so few that no chunk stays in one
    blocks = frozenset(range(1, BLOCKS + 1))
    made = plan(needs, Placement(frozenset(), blocks, blocks, window=BLOCKS))
    disk = rates(disk=1.0)
    found = step(made, trace(1e-3, 1e-3), disk)
    moved = BLOCKS * NUMEL * (10 + 2)
    assert (found.bound_lane, found.ssd_read, found.ssd_written) == ("ssd", moved, moved)
    assert found.bound_s == pytest.approx(2 * moved / 1e9)
    assert found.bound_s <= found.step_s <= 1.1 * found.bound_s


def test_the_disk_gets_as_far_ahead_of_the_updates_as_its_buffers_reach() -> None:
    # 8 chunks of 10 MB are written in a step, of which 4 are read: 0.12 s. 6 buffers are as much, there and back.
    needs = replace(NEEDS, ssd=SsdNeeds(False, True, NUMEL, chunk_buffers=6))
    made = plan(needs, Placement(chunks_on_ssd=frozenset(range(1, BLOCKS + 1)), window=BLOCKS))
    disk, work = rates(disk=1.0), trace(1e-4, 0.12 / BLOCKS)
    found = step(made, work, disk)
    chunk = NUMEL * 10
    assert (found.ssd_read, found.ssd_written) == (4 * chunk, 8 * chunk)
    assert found.step_s < found.backward_s + 0.1 * found.lanes["ssd"] < 2 * found.lanes["ssd"]


def test_states_on_the_gpu_leave_the_lanes() -> None:
    made = plan(placement=Placement(frozenset(range(BLOCKS + 1)), window=BLOCKS))
    found = step(made, trace(0.01, 0.02), rates(update=0.1))
    assert found.lanes["update"] == found.lanes["h2d"] == found.lanes["d2h"] == 0
    assert found.step_s == pytest.approx(0.24, rel=0.01)


def test_a_step_takes_as_long_as_the_host_that_launches_it() -> None:
    """1,000 small operations a micro-batch, of which a GPU does one in 3 us."""
    made, work = plan(placement=Placement(frozenset(range(BLOCKS + 1)), window=BLOCKS)), trace(1e-6, 1e-6, 125)
    found = step(made, work, rates(), micro_batches=3)
    operations = sum(each.operations.total() for each in (*work.forward, *work.backward))
    assert found.step_s == pytest.approx(3 * operations * HOST_OPERATION_S, rel=0.01)
    long = step(made, trace(0.1, 0.2, 125), rates(), micro_batches=3)
    assert long.step_s == pytest.approx(3 * BLOCKS * 0.3, rel=0.03)


def test_a_host_that_computes_itself_launches_nothing() -> None:
    cpu = rates().ceilings.cpu.model_copy(update={"product_tflop_s": 1.0})
    found = Rates.of(Ceilings(source="", cpu=cpu), on_gpu=False)
    many = Counter({Operation("product", 10**11, 0): 1, NOTHING: 10})
    assert found.launches(many) == found.seconds(many) == pytest.approx(0.1, rel=0.01)


def test_experts_in_parts_are_fetched_in_each_forward_and_backward() -> None:
    """Whatever the window; the rest of a block stays in its slot."""
    experts = ParameterInfo("experts", (4, NUMEL // 4), NUMEL, None, of_experts=True)
    layout = build_layout([ParameterInfo("front", (NUMEL,), NUMEL, None), experts], 1)
    codec, needs = Identity(layout, torch.bfloat16), Needs(held_bytes=2, window=BLOCKS, ring=0)
    blocks = [UnitSize(str(index), layout, codec, "block", SPECS, 2) for index in range(1, BLOCKS + 1)]
    for size, again in ((0, 0), (NUMEL, BLOCKS * NUMEL * 2)):
        plan = Plan.of([unit(0), *blocks], replace(needs, experts=size), Placement(window=BLOCKS))
        work = work_of(plan, trace(0.0, 0.0), rates(link=1.0), 1, two=False)
        assert work.up == pytest.approx((NUMEL + BLOCKS * 2 * NUMEL) * 2 / 1e9)
        assert work.again == pytest.approx(again / 1e9)
