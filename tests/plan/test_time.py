"""The simulation of a step, by ceilings that make its answer known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_slide.compression.codec import Identity
from ds_slide.model.layout import ParameterInfo, build_layout
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.low_precision import STATE_FORMATS
from ds_slide.plan.ceilings.figures import Ceilings
from ds_slide.plan.memory import Plan
from ds_slide.plan.needs import Needs, Placement, SsdNeeds, UnitSize
from ds_slide.plan.operations import UNDER_MODE, Operation
from ds_slide.plan.rates import LAUNCH_BESIDE_UPDATE, LAUNCH_S, Launched, Rates
from ds_slide.plan.time import STEP_S, StepTime, all_schedules, step_time, update_bytes
from ds_slide.plan.trace import Segment, StepTrace
from ds_slide.plan.two_passes import Schedule
from ds_slide.store.state_buffers import optimizer_buffers

torch = pytest.importorskip("torch")

NUMEL, BLOCKS = 1 << 20, 8
SPECS = optimizer_buffers(torch.bfloat16, ADAMW, STATE_FORMATS["fp32"])


def unit(index: int, ranks: int = 1) -> UnitSize:
    layout = build_layout([ParameterInfo(f"{index}.weight", (NUMEL,), NUMEL, 0)], ranks)
    kind: Any = "outer" if index == 0 else "block"
    return UnitSize(str(index), layout, Identity(layout, torch.bfloat16), kind, SPECS, 2)


UNITS = [unit(index) for index in range(BLOCKS + 1)]


def trace(forward_s: float, backward_s: float, launches: int = 0) -> StepTrace:
    """So long in each block. Products run at 1 TFLOP/s. `launches`: of the host in each block, beside its product's."""

    def segment(index: int, seconds: float) -> Segment:
        return Segment(index, Counter({Operation("product", int(seconds * 1e12), 0): 1, UNDER_MODE: launches}))

    blocks = range(1, BLOCKS + 1)
    forward = tuple(segment(index, forward_s) for index in blocks)
    backward = tuple(segment(index, backward_s) for index in reversed(blocks))
    return StepTrace(forward, (*backward, Segment(0)), 0, 0)


def rates(update: float = 1e3, link: float = 1e3, disk: float = 1e3) -> Rates:
    """GB/s."""
    gpu = {
        "name": "a GPU",
        "memory_bytes": 1,
        "product_tflop_s": {"8192x8192x8192": 1.0},
        "copy_gb_s": 1e6,
        "h2d_gb_s": link,
        "d2h_gb_s": link,
        "both_ways_gb_s": link,
    }
    cpu = {"name": "a CPU", "memory_bytes": 1, "update_gb_s": update, "update_threads": 1, "copy_gb_s": 1.0}
    one = {"path": "/", "read_gb_s": disk, "write_gb_s": disk, "mixed_gb_s": disk, "direct": True, "backend": "threads"}
    return Rates.of(Ceilings.model_validate({"source": "", "cpu": cpu, "gpu": gpu, "disks": [one]}), on_gpu=True)


NEEDS = Needs(held_bytes=2, window=BLOCKS, ring=0)
PASSES: tuple[Schedule, ...] = ("deferred", "two passes")
UPDATE_GB = (BLOCKS + 1) * 26 * NUMEL / 1e9


def plan(needs: Needs = NEEDS, placement: Placement | None = None) -> Plan:
    return Plan.of(UNITS, needs, placement or Placement(window=needs.window))


def seconds(found: Rates, work: StepTrace, *, micro_batches: int = 1, **placed: Any) -> dict[str, float]:
    made = plan(placement=Placement(window=placed.pop("window", BLOCKS), **placed))
    return {name: each.step_s for name, each in all_schedules(made, NEEDS, work, found, micro_batches).items()}


def test_bytes_of_an_update() -> None:
    assert update_bytes(UNITS[1]) == 26 * NUMEL


def test_where_the_gpu_is_the_bound_nothing_else_shows() -> None:
    assert seconds(rates(), trace(0.01, 0.02))["under backward"] == pytest.approx(0.24, rel=0.05)


def test_deferred_updates_run_under_the_forward_alone() -> None:
    # Updates of 0.20 s beside a forward of 0.08 and a backward of 0.16.
    slow, work = rates(update=UPDATE_GB / 0.20), trace(0.01, 0.02)
    found = seconds(slow, work)
    assert found["deferred"] == pytest.approx(0.16 + 0.20, rel=0.1)
    # The outer module's gradient is final last and its weights are needed first, behind an update that has begun.
    assert found["under backward"] == pytest.approx(0.24 + 2.5 * 0.20 / (BLOCKS + 1), rel=0.05)
    # 18 of 26 bytes under the forward, and 18 under the backward, at 0.97 of the rate.
    assert found["two passes"] == pytest.approx(0.16 + 0.20 * 18 / 26 / 0.97, rel=0.12)
    # Without undo logs nothing is updated ahead.
    assert found["speculative"] == found["deferred"]
    ahead = seconds(slow, work, undo_logs=frozenset(range(1, BLOCKS + 1)))["speculative"]
    spare = seconds(slow, work, spare_states=frozenset(range(1, BLOCKS + 1)))["speculative"]
    assert found["under backward"] <= spare < ahead <= found["two passes"] < found["deferred"]


def test_backward_waits_for_a_buffer_that_an_update_gives_back() -> None:
    """Updates of 0.033 s behind backwards of 0.005 s: with two buffers the last gradient comes down behind the seventh
    update of nine, and a forward of 0.24 s waits for the last one."""

    def under_backward(ring: int) -> float:
        needs = replace(NEEDS, held_bytes=0, ring=ring)
        slow, work = rates(update=UPDATE_GB / 0.30), trace(0.03, 0.005)
        return all_schedules(plan(needs), needs, work, slow, 1)["under backward"].step_s

    assert under_backward(BLOCKS + 1) == pytest.approx(0.04 + 2.5 * 0.0333 + 0.24, rel=0.1)
    assert under_backward(2) == pytest.approx(0.005 + 9 * 0.0333 + 0.24, rel=0.1)
    by_ring = [under_backward(ring) for ring in range(2, BLOCKS + 2)]
    assert by_ring == sorted(by_ring, reverse=True) and by_ring[0] > 1.2 * by_ring[-1]


def test_second_passes_begin_under_the_forward_when_the_first_have_ended() -> None:
    # 0.15 s of each beside a forward of 0.24, which waits for the first two of nine units, and a backward of 0.08.
    found = seconds(rates(update=UPDATE_GB / 0.20), trace(0.03, 0.01))["two passes"]
    assert found == pytest.approx(0.32 + 0.15 * 2 / (BLOCKS + 1) + STEP_S, rel=0.02)


def test_gradients_of_later_micro_batches_are_added_up_under_their_backwards() -> None:
    """6 bytes a parameter and micro-batch of the update's lane: no forward waits for them, and a backward that is
    shorter ends with them."""
    slow, added = rates(update=UPDATE_GB / 0.26), 0.06

    def deferred(work: StepTrace, micro_batches: int) -> StepTime:
        return all_schedules(plan(), NEEDS, work, slow, micro_batches)["deferred"]

    one, four = deferred(trace(0.01, 0.02), 1), deferred(trace(0.01, 0.02), 4)
    assert (one.holding_s, four.holding_s) == (0.0, pytest.approx(3 * added))
    assert four.lanes["update"] - one.lanes["update"] == pytest.approx(3 * added)
    assert four.step_s - one.step_s == pytest.approx(3 * (0.08 + 0.16))
    one, four = (deferred(trace(0.01, 0.005), count) for count in (1, 4))
    assert four.step_s - one.step_s == pytest.approx(3 * (0.08 + added))


def test_copies_take_from_the_memory_that_updates_work_in() -> None:
    # A copy up of 2 of the 26 bytes of an update, 0.6 of which the update moves less, and one down, with all of them.
    found = all_schedules(plan(), NEEDS, trace(0.2, 0.2), rates(update=UPDATE_GB), 1)
    assert found["deferred"].lanes["update"] == pytest.approx(1 + 0.6 * 2 / 26)
    assert found["under backward"].lanes["update"] == pytest.approx(1 + 1.6 * 2 / 26, rel=0.01)


@pytest.mark.parametrize(
    ("update_s", "schedule"),
    [(0.06, "deferred"), (0.20, "two passes"), (0.30, "two passes"), (0.45, "deferred")],
)
def test_the_schedule_is_the_one_that_the_engine_chooses(update_s: float, schedule: str) -> None:
    """Beside a forward of 0.08 s, which the host takes 0.072 s to launch, and a backward of 0.16 s."""

    def chosen(placement: Placement, **options: Any) -> StepTime:
        work, found = trace(0.01, 0.02, int(0.009 / LAUNCH_S)), rates(update=UPDATE_GB / update_s)
        return step_time(plan(placement=placement), NEEDS, work, found, micro_batches=1, **{"two": True, **options})

    without, logs = Placement(window=BLOCKS), Placement(window=BLOCKS, undo_logs=frozenset(range(1, BLOCKS + 1)))
    assert chosen(without).schedule == chosen(without, below_limit=True).schedule == schedule
    assert chosen(without, two=False).schedule == "deferred" and chosen(without).why
    ahead = "deferred" if update_s < 0.08 else "speculative"
    assert chosen(logs, below_limit=True).schedule == ahead and chosen(logs).schedule == schedule


def test_a_forward_is_as_long_as_the_host_has_it_that_chooses_two_passes() -> None:
    """Where it does not wait for updates it is ahead of the GPU: to its clock these are most of a forward. 3 B with
    32,768 tokens and 3 B in 80 GB had two passes where the GPU's forward would have hidden one
    (benchmarks/results/2026-11-25_nvidia-h100_forecast.md)."""
    slow = rates(update=UPDATE_GB / 0.076)
    for launches, schedule in ((0, "two passes"), (int(0.009 / LAUNCH_S), "deferred")):
        work = trace(0.01, 0.02, launches)
        assert step_time(plan(), NEEDS, work, slow, micro_batches=1, two=True).schedule == schedule


def test_a_host_that_is_ahead_of_the_gpu_holds_nothing_up() -> None:
    """A long operation of the GPU gives it time for many short ones; behind a wait it has to launch all of them."""
    found, long, short = rates(), Counter({Operation("product", 10**11, 0): 1}), Counter({UNDER_MODE: 500})
    ahead, behind = Launched(found), Launched(found)
    ahead.run(long)
    ahead.run(short)
    behind.run(short)
    behind.run(long)
    assert ahead.now == pytest.approx(0.1) and ahead.ahead == pytest.approx(0.1 - 501 * LAUNCH_S)
    assert behind.now == pytest.approx(500 * LAUNCH_S + 0.1)
    ahead.wait(1.0)
    ahead.run(short)
    assert ahead.now == ahead.host == pytest.approx(1.0 + 500 * LAUNCH_S)


def test_a_host_that_computes_itself_is_never_ahead() -> None:
    cpu = rates().ceilings.cpu.model_copy(update={"product_tflop_s": 1.0})
    found = Rates.of(Ceilings(source="", cpu=cpu), on_gpu=False)
    step = Launched(found)
    step.run(Counter({Operation("product", 10**11, 0): 1, UNDER_MODE: 10}))
    assert step.host == step.now == pytest.approx(0.1)


def test_what_the_host_takes_is_what_doctor_has_measured() -> None:
    constant, many = rates(), Counter({UNDER_MODE: 100})
    measured = replace(constant, ceilings=constant.ceilings.model_copy(update={"engine_operation_s": 2e-5}))
    assert constant.seconds(many) == pytest.approx(100 * LAUNCH_S)
    assert measured.seconds(many) == pytest.approx(100 * 2e-5)


def with_host(constant: Rates, *, operation_s: float, visit_s: float | None) -> Rates:
    figures = {"engine_operation_s": operation_s, "engine_visit_s": visit_s}
    return replace(constant, ceilings=constant.ceilings.model_copy(update=figures))


def test_blocks_that_pass_through_the_window_take_more_of_the_host() -> None:
    """Twice a micro-batch, and not those whose states are on the GPU."""
    found = []
    for on_gpu in (frozenset(range(BLOCKS + 1)), frozenset({0, 1, 2})):
        made = plan(placement=Placement(on_gpu, window=BLOCKS))
        for visit_s in (None, 2e-3):
            host = with_host(rates(link=1e6, update=1e6), operation_s=1e-3, visit_s=visit_s)
            found.append(step_time(made, NEEDS, trace(1e-6, 1e-6), host, micro_batches=3, two=True).step_s)
    none, still_none, others, more = found
    assert none == still_none
    assert more - others == pytest.approx(3 * 2 * (BLOCKS - 2) * 2e-3)


def test_a_host_launches_more_slowly_while_it_updates() -> None:
    many = Counter({UNDER_MODE: 100})
    step = Launched(with_host(rates(), operation_s=1e-3, visit_s=None), updates_end=0.15)
    step.run(many)
    # Until 0.15 s at a part of its pace, and then at all of it.
    assert step.host == pytest.approx(0.15 + 0.1 - 0.15 / LAUNCH_BESIDE_UPDATE)
    step.run(many)
    assert step.host == pytest.approx(0.15 + 0.2 - 0.15 / LAUNCH_BESIDE_UPDATE)


def test_attention_is_as_fast_as_doctor_has_measured_it() -> None:
    def seconds(keys: int, width: int) -> float:
        return found.seconds(Counter({Operation("attention", 10**12, 0, (keys, keys, width)): 1}))

    figures = {"attention_tflop_s": {"2048": 400.0, "32768": 500.0}, "attention_backward_tflop_s": {}}
    gpu = rates().ceilings.gpu
    assert gpu is not None
    measured = rates().ceilings.model_copy(update={"gpu": gpu.model_copy(update=figures)})
    found = replace(rates(), ceilings=measured)
    assert [seconds(2048, 128), seconds(32768, 128)] == pytest.approx([1 / 400, 1 / 500])
    assert 1 / 500 < seconds(8192, 128) < 1 / 400 < seconds(512, 128)
    assert 0.70 < seconds(2048, 128) / seconds(2048, 64) < 0.85
    constant = Operation("attention backward", 10**12, 0, (2048, 2048, 128))
    assert found.seconds(Counter({constant: 1})) == rates().seconds(Counter({constant: 1}))


def test_a_backward_of_blocks_with_states_on_the_gpu_hides_no_second_pass() -> None:
    # It comes last, after updates of 0.30 s in all, which are those of half of the blocks or of all units.
    found = []
    for promoted in (frozenset(range(BLOCKS // 2 + 1)), frozenset[int]()):
        made = plan(placement=Placement(window=BLOCKS, promoted=promoted))
        slow, work = rates(update=(1 - len(promoted) / len(UNITS)) * UPDATE_GB / 0.30), trace(0.01, 0.02)
        chosen = step_time(made, NEEDS, work, slow, micro_batches=1, two=True)
        assert chosen.step_s == min(all_schedules(made, NEEDS, work, slow, 1)[each].step_s for each in PASSES)
        found.append(chosen.schedule)
    assert found == ["deferred", "two passes"]


def test_a_window_that_holds_all_blocks_saves_their_second_fetch() -> None:
    link = rates(link=2 * NUMEL / 1e9)  # a second for each unit
    made = [plan(placement=Placement(window=window)) for window in (BLOCKS, 3)]
    found = [all_schedules(each, NEEDS, trace(0.1, 0.1), link, 2)["deferred"].lanes["h2d"] for each in made]
    # In each backward five blocks are not there any more, nor in the forward of the second micro-batch.
    assert found == pytest.approx([BLOCKS + 1, BLOCKS + 1 + 3 * 5])


@pytest.mark.parametrize("shares", [True, False])
def test_ranks_that_share_weights_read_the_parts_of_all(shares: bool) -> None:
    units, needs = [unit(order, 2) for order in range(BLOCKS + 1)], replace(NEEDS, world_size=2, shares_weights=shares)
    made, link = Plan.of(units, needs, Placement(window=BLOCKS)), rates(link=2 * NUMEL / 1e9)
    lanes = all_schedules(made, needs, trace(0.1, 0.1), link, 1)["deferred"].lanes
    whole = BLOCKS + 1
    assert [lanes["h2d"], lanes["d2h"]] == pytest.approx([whole if shares else whole / 2, whole / 2])


def test_a_slow_disk_is_the_bound() -> None:
    needs = replace(NEEDS, ssd=SsdNeeds(True, True, NUMEL, chunk_buffers=2))  # so few that no chunk stays in one
    blocks = frozenset(range(1, BLOCKS + 1))
    made = plan(needs, Placement(frozenset(), blocks, blocks, window=BLOCKS))
    disk = rates(disk=1.0)
    found = step_time(made, needs, trace(1e-3, 1e-3), disk, micro_batches=1, two=True)
    moved = BLOCKS * NUMEL * (10 + 2)
    assert (found.bound_lane, found.ssd_read, found.ssd_written) == ("ssd", moved, moved)
    assert found.bound_s == pytest.approx(2 * moved / 1e9)
    assert found.bound_s <= found.step_s <= 1.1 * found.bound_s


def test_the_disk_gets_as_far_ahead_of_the_updates_as_its_buffers_reach() -> None:
    # 8 chunks of 10 MB are written in a step, of which 4 are read: 0.12 s. 6 buffers are as much, there and back.
    needs = replace(NEEDS, ssd=SsdNeeds(False, True, NUMEL, chunk_buffers=6))
    made = plan(needs, Placement(chunks_on_ssd=frozenset(range(1, BLOCKS + 1)), window=BLOCKS))
    disk, work = rates(disk=1.0), trace(1e-4, 0.12 / BLOCKS)
    found = step_time(made, needs, work, disk, micro_batches=1, two=True)
    chunk = NUMEL * 10
    assert (found.ssd_read, found.ssd_written) == (4 * chunk, 8 * chunk)
    backward = found.backward_s + STEP_S
    assert found.step_s < backward + 0.1 * found.lanes["ssd"] < 2 * found.lanes["ssd"]


def test_states_on_the_gpu_leave_the_lanes() -> None:
    made = plan(placement=Placement(frozenset(range(BLOCKS + 1)), window=BLOCKS))
    found = step_time(made, NEEDS, trace(0.01, 0.02), rates(update=0.1), micro_batches=1, two=True)
    assert found.lanes["update"] == found.lanes["h2d"] == found.lanes["d2h"] == 0
    assert found.step_s == pytest.approx(0.24 + STEP_S, rel=0.01)


def test_a_mode_takes_time_of_the_host_alone() -> None:
    """It adds no kernel: a GPU does not notice it that the host does not hold up."""
    found, modes = rates(), Counter({UNDER_MODE: 10})
    long, short = (Counter({Operation("product", flops, 0): 10}) for flops in (10**10, 1))
    assert found.seconds(long + modes) == found.seconds(long)
    assert found.seconds(short + modes) == pytest.approx(2 * found.seconds(short))


times = st.floats(1e-4, 0.1)
speeds = st.floats(0.1, 1e3)


@given(
    forward=times, backward=times, update=speeds, link=speeds, micro=st.integers(1, 4), window=st.integers(3, BLOCKS)
)
def test_no_schedule_is_shorter_than_its_busiest_lane_and_faster_lanes_never_slow_it(
    forward: float, backward: float, update: float, link: float, micro: int, window: int
) -> None:
    made, work = plan(placement=Placement(window=window)), trace(forward, backward)
    slow = all_schedules(made, NEEDS, work, rates(update, link), micro)
    fast = all_schedules(made, NEEDS, work, rates(2 * update, 2 * link), micro)
    for name, each in slow.items():
        assert each.step_s >= max(each.lanes.values())
        assert fast[name].step_s <= each.step_s * 1.001
    begun = 28 * NUMEL / 1e9 / update  # an update that has begun is not put off for a more urgent one
    assert slow["under backward"].step_s <= slow["deferred"].step_s + begun
