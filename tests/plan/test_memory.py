"""Which states go to the GPU, and budgets that are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from ds_slide.compression.codec import Identity
from ds_slide.errors import SlideError
from ds_slide.model.layout import ParameterInfo, UnitLayout, build_layout
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.low_precision import STATE_FORMATS
from ds_slide.plan import memory
from ds_slide.plan.allocations import BLOCK_RING, EXPERT_BUFFERS, EXPERTS, PIECES, PIECES_RING, SLOTS, undo_bytes
from ds_slide.plan.memory import AUTOMATIC, NOTHING_TAKEN, Budgets, Plan, Taken, gpu_cost, make_plan
from ds_slide.plan.movable import movable_states, summable_units, why_fixed
from ds_slide.plan.needs import Needs, SsdNeeds, UnitSize
from ds_slide.plan.placement import USABLE_SHARE
from ds_slide.report.log import size
from ds_slide.store.state_buffers import optimizer_buffers

OUTER, BLOCK = 64_000, 6_400
SPECS = optimizer_buffers(torch.bfloat16, ADAMW, STATE_FORMATS["fp32"])
PLENTY = 1 << 40


def size_of(name: str, layout: UnitLayout) -> UnitSize:
    codec = Identity(layout, torch.bfloat16)
    return UnitSize(name, layout, codec, "outer" if name.startswith("outer") else "block", SPECS, 2)


def unit(name: str, numel: int, frozen: int = 0) -> UnitSize:
    infos = [ParameterInfo("weight", (numel,), numel, 0)] if numel else []
    infos += [ParameterInfo("frozen", (frozen,), frozen, None)] if frozen else []
    return size_of(name, build_layout(infos, 1))


UNITS = [unit("outer", OUTER), *(unit(f"blocks.{index}", BLOCK) for index in range(4))]
# bf16, gradients held.
NEEDS = Needs(held_bytes=2, window=2, ring=0)
BUDGETS = Budgets(PLENTY, PLENTY, PLENTY, gpu_states=0, gpu_memory=None, host_memory=None)
OUTER_COST = OUTER * (2 + 8 + 2)
BLOCK_COST = BLOCK * (2 + 2 + 8 + 2)
WINDOW_BYTES = 2 * BLOCK * 2 + 2 * BLOCK * 2 + OUTER * 2
PIECES_BYTES = PIECES * OUTER * 2
HOST_BYTES = (OUTER + 4 * BLOCK) * (2 + 2 + 8 + 2) + PIECES_BYTES


def plan(**budgets: object) -> Plan:
    return make_plan(UNITS, NEEDS, replace(BUDGETS, **budgets))  # type: ignore[arg-type]


def test_cost_of_a_unit_on_the_gpu() -> None:
    assert gpu_cost(UNITS[0], NEEDS) == OUTER_COST
    assert gpu_cost(UNITS[1], NEEDS) == BLOCK_COST


@pytest.mark.parametrize(
    ("allowance", "on_gpu"),
    [
        (0, ()),
        (BLOCK_COST - 1, ()),
        (OUTER_COST - 1, (1, 2, 3, 4)),  # an outer module that does not fit leaves its share to the blocks
        (OUTER_COST, (0,)),
        (OUTER_COST + BLOCK_COST, (0, 1)),
        (OUTER_COST + 3 * BLOCK_COST - 1, (0, 1, 2)),
        (PLENTY, (0, 1, 2, 3, 4)),
    ],
)
def test_outer_modules_come_first_then_the_first_blocks(allowance: int, on_gpu: tuple[int, ...]) -> None:
    made = plan(gpu_states=allowance)
    assert made.placement.on_gpu == frozenset(on_gpu)
    assert made.gpu_states_used == sum(gpu_cost(UNITS[index], NEEDS) for index in on_gpu)


def test_bytes_of_a_plan_without_gpu_states() -> None:
    made = plan()
    assert made.gpu_bytes == WINDOW_BYTES
    assert made.host_bytes == HOST_BYTES


def test_frozen_parameters_have_weights_only() -> None:
    frozen = [unit("outer", OUTER), unit("blocks.0", 0, frozen=BLOCK), unit("blocks.1", BLOCK, frozen=BLOCK)]
    assert make_plan(frozen, NEEDS, BUDGETS).host_bytes == (OUTER + BLOCK) * 14 + 2 * BLOCK * 2 + PIECES_BYTES


class Half(Identity):
    """Sends, and has states for, every other element."""

    @property
    def numel(self) -> int:
        return super().numel // 2


def test_gradients_and_states_have_the_elements_of_the_codec() -> None:
    halved = [replace(unit, codec=Half(unit.layout, torch.bfloat16)) for unit in UNITS]
    for needs in (NEEDS, replace(NEEDS, held_bytes=0, ring=4)):
        whole, half = make_plan(UNITS, needs, BUDGETS), make_plan(halved, needs, BUDGETS)
        weights = {each.what for each in whole.allocations if "weight" in each.what or "window" in each.what}
        for one, other in zip(whole.allocations, half.allocations, strict=True):
            assert one.what == other.what and other.nbytes * 2 == one.nbytes * (2 if one.what in weights else 1)


def test_gradient_buffers_count() -> None:
    ring = replace(NEEDS, held_bytes=0, ring=4)
    assert make_plan(UNITS, ring, BUDGETS).host_bytes == (OUTER + 4 * BLOCK) * 12 + (4 * BLOCK + OUTER) * 2


def test_spare_host_memory_becomes_gradient_buffers() -> None:
    """One for every three blocks, in half of what is left, and none where a disk is what updates wait for."""
    units = [UNITS[0], *(replace(UNITS[1], name=f"layers.{number}") for number in range(20))]
    needs = replace(NEEDS, held_bytes=0, ring=4, ring_grows=True)
    least = make_plan(units, replace(needs, ring_grows=False), BUDGETS)

    def buffers(needs: Needs, host_free: int) -> int:
        made = make_plan(units, needs, replace(BUDGETS, host_free=host_free))
        assert made.host_bytes - least.host_bytes == (made.entry(BLOCK_RING).count - 4) * 2 * BLOCK
        return made.entry(BLOCK_RING).count

    assert buffers(needs, 1 << 40) == 7 and buffers(replace(needs, ring=8), 1 << 40) == 8
    assert buffers(replace(needs, ring_grows=False), 1 << 40) == 4
    room_for_two = math.ceil((least.host_bytes + 2 * 2 * (2 * BLOCK)) / USABLE_SHARE)
    assert [buffers(needs, free) for free in (room_for_two, room_for_two - 100)] == [6, 5]
    assert buffers(needs, least.host_bytes) == 4
    on_ssd = make_plan(units, replace(needs, ssd=SsdNeeds(False, True, 1 << 20)), replace(BUDGETS, host_memory=0))
    assert on_ssd.placement.on_ssd and on_ssd.entry(BLOCK_RING).count == 4


def test_gradients_of_a_second_backward_need_no_more_than_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.plan.allocations.PIECE_BYTES", 1000)
    assert plan().host_bytes == HOST_BYTES - PIECES_BYTES + PIECES * 1000
    assert plan(gpu_states=PLENTY).host_bytes == 0


@pytest.mark.parametrize("source", ["gpu_memory", "gpu_free"])
def test_gpu_budget_is_hard(source: str) -> None:
    assert plan(**{source: WINDOW_BYTES}).gpu_bytes == WINDOW_BYTES
    name = "ds_slide.gpu_memory" if source == "gpu_memory" else "free GPU memory"
    need = f"need {WINDOW_BYTES:,} bytes, but {name} is {WINDOW_BYTES - 1:,} bytes, 1 byte short"
    sentence = rf"GPU tier: .* {need}; lower ds_slide.window"
    with pytest.raises(SlideError, match=sentence):
        plan(**{source: WINDOW_BYTES - 1})


def test_refusals_name_what_takes_most() -> None:
    moments = f"exp_avg of outer \\({4 * OUTER:,} bytes\\), exp_avg_sq of outer \\({4 * OUTER:,} bytes\\)"
    weights = f"weight of outer \\({2 * OUTER:,} bytes\\)"
    with pytest.raises(
        SlideError, match=rf"GPU tier: .*; the largest entries are whole weights of outer \({2 * OUTER:,}"
    ):
        plan(gpu_memory=1)
    passing = f"{PIECES_RING} \\({PIECES_BYTES:,} bytes\\)"
    with pytest.raises(SlideError, match=rf"host tier: .*; the largest entries are {moments}, {passing}$"):
        plan(host_free=1)
    with pytest.raises(SlideError, match=rf"host tier: the states .*; the largest entries are {moments}, {weights}$"):
        plan(host_memory=1)


def test_gpu_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SlideError, match=r"GPU tier: .* or ds_slide.gpu_states \(now"):
        plan(gpu_states=OUTER_COST, gpu_memory=WINDOW_BYTES + OUTER_COST - 1)
    assert plan(gpu_states=OUTER_COST, gpu_memory=WINDOW_BYTES + OUTER_COST).placement.on_gpu == {0}


def test_free_host_memory_is_a_hard_limit() -> None:
    assert plan(host_free=HOST_BYTES).host_bytes == HOST_BYTES
    need = f"need {size(HOST_BYTES)}, but {size(HOST_BYTES - 1)} are free, 1 byte short"
    sentence = rf"host tier: .* {need}; .*\"nvme\".*defer_updates"
    with pytest.raises(SlideError, match=sentence):
        plan(host_free=HOST_BYTES - 1)


def test_without_an_ssd_tier_the_budget_of_the_states_is_hard() -> None:
    states = (OUTER + 4 * BLOCK) * 12  # held gradients and buffers come on top of ds_slide.host_memory
    assert plan(host_memory=states).host_bytes == HOST_BYTES
    limit = f"ds_slide.host_memory is {size(states - 1)}, 1 byte short"
    sentence = rf"host tier: the states need {size(states)}, but {limit}; .*SSD"
    with pytest.raises(SlideError, match=sentence):
        plan(host_memory=states - 1)


SLOT = BLOCK * 2


@pytest.mark.parametrize(
    ("budgets", "window"),
    [
        ({}, 4),  # one for each block
        ({"gpu_total": 10 * SLOT}, 3),
        ({"gpu_total": 10 * SLOT - 1}, 2),
        ({"gpu_free": WINDOW_BYTES + 2 * SLOT - 1}, 3),
        ({"gpu_memory": WINDOW_BYTES + SLOT}, 3),
        ({"gpu_memory": WINDOW_BYTES}, 2),
        # Of four blocks three are left to stream: their states stay away from the slots' room.
        ({"gpu_states": OUTER_COST + BLOCK_COST}, 3),
    ],
)
def test_spare_gpu_memory_becomes_slots(budgets: dict[str, int], window: int) -> None:
    made = make_plan(UNITS, replace(NEEDS, window_grows=True), replace(BUDGETS, **budgets))  # type: ignore[arg-type]
    assert made.placement.window == window
    assert made.gpu_bytes == plan(**budgets).gpu_bytes + (window - 2) * SLOT
    assert plan(**budgets).placement.window == 2


def of_two_ranks(name: str, numel: int) -> UnitSize:
    return size_of(name, build_layout([ParameterInfo("weight", (numel,), numel, 0)], 2))


TWO_RANKS = [of_two_ranks("outer", OUTER), *(of_two_ranks(f"blocks.{index}", BLOCK) for index in range(4))]
# Two, each with the parts of both ranks of a block and the average of its own; and that average of the outer module.
STAGING_BYTES = 2 * (BLOCK // 2 * 3) * 2 + OUTER // 2 * 2
ON_GPU = 2 * BLOCK * 2 + OUTER * 2


OWN = BLOCK // 2


@pytest.mark.parametrize(
    ("shares", "host_memory", "passing", "slot"),
    [
        (True, None, BLOCK, BLOCK),  # the parts of a block meet
        (
            False,
            None,
            OUTER + OUTER // 2 + 2 * OWN,
            BLOCK + OWN,
        ),  # of any unit; a part beside the outer module and each slot
        (True, OUTER + 2 * BLOCK, BLOCK + BLOCK + 2 * OWN, BLOCK + OWN),  # two blocks are shared, two on SSD
        (True, 0, BLOCK + 2 * OWN, BLOCK + OWN),  # all blocks are on SSD
    ],
)
def test_what_several_ranks_take_on_the_gpu(shares: bool, host_memory: int | None, passing: int, slot: int) -> None:
    ssd = SsdNeeds(weights=True, states=True, chunk_numel=2048)
    needs = replace(NEEDS, world_size=2, shares_weights=shares, ssd=ssd)
    budgets = replace(BUDGETS, host_memory=host_memory)
    assert make_plan(TWO_RANKS, needs, budgets).gpu_bytes == ON_GPU + STAGING_BYTES + passing * 2
    growing = replace(needs, window_grows=True)
    grown = make_plan(TWO_RANKS, growing, budgets)
    most = ON_GPU + STAGING_BYTES + passing * 2 + 2 * slot * 2
    assert (grown.placement.window, grown.gpu_bytes) == (4, most)
    assert make_plan(TWO_RANKS, growing, replace(budgets, gpu_memory=most - 1)).placement.window == 3


@pytest.mark.parametrize("shares", [True, False])
def test_updated_on_the_gpu_several_ranks_keep_their_parts_beside_the_whole(shares: bool) -> None:
    """A block: its whole weights, and for this rank weight, moments, remainder and gradient. The parts of the outer
    module, which is the largest, meet in a buffer anyway where nothing is shared."""
    needs = replace(NEEDS, world_size=2, shares_weights=shares)
    cost = gpu_cost(TWO_RANKS[1], needs)
    assert cost == BLOCK * 2 + OWN * (2 + 2 + 8 + 2)
    without = make_plan(TWO_RANKS, needs, BUDGETS)
    made = make_plan(TWO_RANKS, needs, replace(BUDGETS, gpu_states=cost))
    assert made.placement.on_gpu == {1} and made.gpu_states_used == cost
    assert made.gpu_bytes == without.gpu_bytes + cost + (BLOCK * 2 if shares else 0)


def test_automatic_states_never_break_a_budget_that_fits_without_them() -> None:
    for limit in range(WINDOW_BYTES, WINDOW_BYTES + 2 * OUTER_COST, OUTER_COST // 7):
        made = plan(gpu_states=None, gpu_memory=limit)
        assert made.gpu_bytes <= limit


def test_nor_do_they_for_ranks_that_gather_what_is_updated_there() -> None:
    needs = replace(NEEDS, world_size=2, shares_weights=True)
    least = make_plan(TWO_RANKS, needs, BUDGETS).gpu_bytes
    cost = gpu_cost(TWO_RANKS[1], needs)
    for more, on_gpu in ((0, 0), (cost, 0), (cost + 2 * BLOCK - 1, 0), (cost + 2 * BLOCK, 1)):
        made = make_plan(TWO_RANKS, needs, replace(BUDGETS, gpu_states=None, gpu_memory=least + more))
        assert len(made.placement.on_gpu) == on_gpu and made.gpu_bytes <= least + more


def test_an_outer_module_that_passes_takes_its_buffers_and_is_never_placed_on_the_gpu() -> None:
    head = replace(UNITS[0], passing_numel=250)
    made = make_plan([head, *UNITS[1:]], NEEDS, replace(BUDGETS, gpu_states=PLENTY))
    assert made.placement.on_gpu == frozenset((1, 2, 3, 4))
    made = make_plan([head, *UNITS[1:]], NEEDS, BUDGETS)
    assert made.gpu_bytes == WINDOW_BYTES - 2 * OUTER + 2 * 1_000


@pytest.mark.parametrize("missing, on_gpu", [(0, {0}), (1, {0, 1}), (12 * BLOCK, {0, 1}), (14 * BLOCK + 1, {0, 1, 2})])
def test_where_host_memory_is_short_more_states_go_to_the_gpu(missing: int, on_gpu: set[int]) -> None:
    """As few as suffice, and no more than their share of it: of 20 times the outer module's, 5 % hold it alone."""
    total = 20 * OUTER_COST
    budgets = replace(BUDGETS, gpu_total=total, gpu_states=None)
    host_bytes = make_plan(UNITS, NEEDS, budgets).host_bytes
    assert make_plan(UNITS, NEEDS, replace(budgets, host_free=host_bytes - missing)).placement.on_gpu == on_gpu
    too_little = replace(budgets, gpu_total=OUTER_COST, host_free=host_bytes - missing)
    if missing:
        with pytest.raises(SlideError, match=r"host tier: .*free"):
            make_plan(UNITS, NEEDS, too_little)


def test_states_whose_place_is_configured_stay_there_where_host_memory_is_short() -> None:
    with pytest.raises(SlideError, match=r"ds_slide.gpu_states \(now 0 bytes"):
        plan(host_free=HOST_BYTES - 1)


# ---- several engines in a process ------------------------------------------------------------------------------------

TOTAL = 1_000_000
"""Of a GPU whose shares are a few slots and units: 50,000 bytes of states, 100,000 of slots."""
SLOT = BLOCK * 2
SMALL_GPU = replace(BUDGETS, gpu_total=TOTAL, gpu_states=None)
GROWING = replace(NEEDS, window_grows=True)


def test_the_automatic_shares_are_for_all_engines_together() -> None:
    small = [UNITS[0], *(unit(f"blocks.{index}", BLOCK // 10) for index in range(8))]
    cost, slot = gpu_cost(small[1], NEEDS), SLOT // 10
    alone = make_plan(small, GROWING, SMALL_GPU)
    assert alone.placement.on_gpu == frozenset(range(1, 1 + min(8, TOTAL // 20 // cost)))
    for others, left in ((TOTAL // 20 - cost, 1), (TOTAL // 20 - cost + 1, 0), (TOTAL, 0)):
        assert (
            len(make_plan(small, GROWING, replace(SMALL_GPU, taken=Taken(gpu_states=others))).placement.on_gpu) == left
        )
    no_states = replace(SMALL_GPU, gpu_states=0)
    assert make_plan(small, GROWING, no_states).placement.window == 8
    for others, more in ((TOTAL // 10 - 3 * slot, 3), (TOTAL // 10 - 3 * slot + 1, 2), (TOTAL, 0)):
        assert (
            make_plan(small, GROWING, replace(no_states, taken=Taken(window=others))).placement.window
            == NEEDS.window + more
        )


def test_configured_limits_are_for_all_engines_together() -> None:
    assert plan(gpu_states=OUTER_COST + 10, taken=Taken(gpu_states=10)).placement.on_gpu == frozenset((0,))
    assert 0 not in plan(gpu_states=OUTER_COST + 10, taken=Taken(gpu_states=11)).placement.on_gpu
    plan(gpu_memory=WINDOW_BYTES + 7, taken=Taken(gpu=7))
    with pytest.raises(
        SlideError, match=r"gpu_memory is [\d,]+ bytes beside the 8 bytes of other engines in this process"
    ):
        plan(gpu_memory=WINDOW_BYTES + 7, taken=Taken(gpu=8))
    states = plan().host_state_bytes
    plan(host_memory=states + 7, taken=Taken(host_states=7))
    with pytest.raises(SlideError, match=r"host_memory is .* beside the 8 bytes of other engines in this process"):
        plan(host_memory=states + 7, taken=Taken(host_states=8))
    # What is free has been measured after the others.
    assert plan(gpu_free=WINDOW_BYTES, taken=Taken(gpu=PLENTY)).gpu_bytes == WINDOW_BYTES


def test_undo_logs_take_what_is_left_and_nothing_else() -> None:
    needs = replace(NEEDS, speculates=True, out_of_place=False)
    without = make_plan(UNITS, NEEDS, BUDGETS)
    logged = make_plan(UNITS, needs, BUDGETS)
    blocks = [index for index, unit in enumerate(UNITS) if unit.kind == "block"]
    assert logged.placement.undo_logs == frozenset(blocks)
    assert logged.host_bytes == without.host_bytes + logged.undo_log_bytes
    assert logged.taken.host_states == without.taken.host_states + logged.undo_log_bytes
    one = logged.undo_log_bytes // len(blocks)

    def chosen(**budgets: int) -> list[int]:
        made = make_plan(UNITS, needs, replace(BUDGETS, **budgets))
        limit = budgets.get("host_memory", PLENTY)
        assert made.host_state_bytes + made.undo_log_bytes <= limit
        return sorted(made.placement.undo_logs)

    room = lambda nbytes: -(-(without.host_bytes + 2 * nbytes) * 100 // 95)  # noqa: E731
    assert chosen(host_free=room(one) + 2) == blocks[-1:]  # the last one's gradient arrives first
    assert chosen(host_free=room(one) - 4) == []
    assert chosen(host_memory=without.host_state_bytes + 2 * one) == blocks[-2:]
    assert chosen(host_memory=without.host_state_bytes) == []


def test_spare_states_take_the_place_of_undo_logs_where_they_fit() -> None:
    without = make_plan(UNITS, NEEDS, BUDGETS)
    blocks = [index for index, unit in enumerate(UNITS) if unit.kind == "block"]
    spare = 12 * BLOCK

    def chosen(nbytes: int, out_of_place: Literal["auto"] | bool = "auto", **other: Any) -> tuple[list[int], list[int]]:
        """Blocks with spare states, and with logs, where `host_memory` leaves `nbytes`."""
        needs = replace(NEEDS, speculates=True, out_of_place=out_of_place, **other)
        limit = without.host_state_bytes + nbytes
        made = make_plan(UNITS, needs, replace(BUDGETS, host_memory=limit))
        assert made.taken.host_states <= limit
        assert made.host_bytes == without.host_bytes + made.undo_log_bytes + made.spare_state_bytes
        assert made.spare_state_bytes == spare * len(made.placement.spare_states)
        return sorted(made.placement.spare_states), sorted(made.placement.undo_logs)

    log = undo_bytes(UNITS[1], NEEDS)
    assert chosen(4 * spare) == (blocks, [])
    assert chosen(4 * log) == ([], blocks)
    assert chosen(4 * log - 1) == ([], blocks[1:])
    # The last one's gradient arrives first, and every block has a way back before any has a longer one.
    assert chosen(4 * log + (spare - log)) == (blocks[3:], blocks[:3])
    assert chosen(4 * log + 2 * (spare - log) - 1) == (blocks[3:], blocks[:3])
    assert chosen(spare + log, out_of_place=True) == (blocks[3:], blocks[2:3])
    assert chosen(4 * spare, out_of_place=False) == ([], blocks)


def test_blocks_that_others_read_or_that_train_in_part_have_no_spare_states() -> None:
    needs = replace(NEEDS, speculates=True, out_of_place=True)
    partly = unit("blocks.4", BLOCK, frozen=BLOCK)
    made = make_plan([*UNITS, partly], needs, BUDGETS)
    assert made.placement.undo_logs == {5} and made.placement.spare_states == {1, 2, 3, 4}
    assert not make_plan(UNITS, replace(needs, world_size=2), BUDGETS).placement.spare_states


def test_taken_adds_up() -> None:
    assert NOTHING_TAKEN + Taken(1, 2, 3, 4) + Taken(10, 20, 30, 40) == Taken(11, 22, 33, 44)


# ---- without an optimizer --------------------------------------------------------------------------------------------

FROZEN = [
    replace(frozen, specs=())
    for frozen in (unit("outer", 0, frozen=OUTER), *(unit(f"blocks.{index}", 0, frozen=BLOCK) for index in range(4)))
]
FORWARDS = replace(NEEDS, trains=False, window_grows=True)


def test_without_an_optimizer_there_are_weights_in_host_memory_and_a_window() -> None:
    made = make_plan(FROZEN, FORWARDS, replace(SMALL_GPU, gpu_states=PLENTY, gpu_total=0))
    assert made.placement.on_gpu == frozenset()
    assert made.host_bytes == made.host_state_bytes == (OUTER + 4 * BLOCK) * 2
    assert made.gpu_bytes == 2 * SLOT + OUTER * 2
    assert made.gpu_states_used == 0


@pytest.mark.parametrize(("share", "window"), [(2 * SLOT - 1, 2), (2 * SLOT, 4), (PLENTY, 4)])
def test_without_a_backward_more_slots_help_only_if_all_blocks_fit(share: int, window: int) -> None:
    assert make_plan(FROZEN, FORWARDS, replace(BUDGETS, gpu_total=10 * share)).placement.window == window
    trained = make_plan(UNITS, GROWING, replace(BUDGETS, gpu_total=10 * share))
    assert trained.placement.window == (4 if share >= 2 * SLOT else 3)


def test_weights_that_do_not_fit_name_what_would_help() -> None:
    with pytest.raises(SlideError, match=r"weights need .*change zero_optimization\.offload_param\.device"):
        make_plan(FROZEN, FORWARDS, replace(BUDGETS, host_free=1_000))


# ---- experts that move in parts --------------------------------------------------------------------------------------

COUNT, EXPERT, FRONT = 64, 1024, 640


def mixture_block(name: str) -> UnitSize:
    """A frozen block of 64 experts with 1,024 elements each, and 640 others."""
    infos = [
        ParameterInfo("experts", (COUNT, 32, 32), COUNT * EXPERT, None, of_experts=True),
        ParameterInfo("front", (FRONT,), FRONT, None),
    ]
    return size_of(name, build_layout(infos, 1))


MIXTURE = [unit("outer", OUTER), *(mixture_block(f"blocks.{index}") for index in range(4))]
AUTO = replace(NEEDS, experts="auto")
WHOLE_SLOT, FRONT_SLOT = (FRONT + COUNT * EXPERT) * 2, FRONT * 2


def test_experts_move_in_parts_where_whole_slots_do_not_fit_or_take_half_of_the_gpu() -> None:
    chosen = replace(AUTOMATIC, experts=4 * EXPERT * 2 + 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "AUTOMATIC", chosen)
        for gpu, parts in ((4 * WHOLE_SLOT, False), (4 * WHOLE_SLOT - 1, True), (2 * WHOLE_SLOT, True)):
            made = make_plan(MIXTURE, AUTO, replace(BUDGETS, gpu_memory=gpu))
            assert bool(made.needs.experts) == parts
            assert made.entry(SLOTS).piece == (FRONT_SLOT if parts else WHOLE_SLOT)
            if parts:
                assert made.entry(EXPERTS).count == EXPERT_BUFFERS
                assert 4 * EXPERT * 2 <= made.entry(EXPERTS).piece <= chosen.experts
        assert made.gpu_bytes == 2 * FRONT_SLOT + made.entry(EXPERTS).nbytes + OUTER * 2
        with pytest.raises(SlideError, match="GPU tier"):
            make_plan(MIXTURE, AUTO, replace(BUDGETS, gpu_memory=made.gpu_bytes - 1))
    # The host has the same bytes either way.
    whole, in_parts = (make_plan(MIXTURE, replace(NEEDS, experts=size), BUDGETS) for size in (0, 10_000))
    assert whole.host_bytes == in_parts.host_bytes


def test_small_blocks_move_whole_unless_parts_need_less() -> None:
    """Three buffers with all experts of a block are more than two slots."""
    made = make_plan(MIXTURE, AUTO, replace(BUDGETS, gpu_memory=3 * WHOLE_SLOT))
    assert made.needs.experts == 0 and made.entry(SLOTS).count == 2


@pytest.mark.parametrize(("wanted", "experts"), [(1, 1), (5 * EXPERT * 2 + 1, 5), (PLENTY, COUNT)])
def test_a_buffer_holds_at_least_one_expert_and_at_most_all(wanted: int, experts: int) -> None:
    made = make_plan(MIXTURE, replace(NEEDS, experts=wanted), BUDGETS)
    assert made.entry(EXPERTS).piece // (EXPERT * 2) == experts


def test_blocks_with_experts_in_parts_stay_in_host_memory() -> None:
    made = make_plan(MIXTURE, replace(NEEDS, experts=4 * EXPERT * 2), replace(BUDGETS, gpu_states=PLENTY))
    assert made.placement.on_gpu == {0}
    assert [why_fixed(made, index) for index in range(1, 5)] == ["its experts move in parts"] * 4


@pytest.mark.parametrize("blocks", [1, 2, 3, 28, 36])
@pytest.mark.parametrize("on_gpu", [0, 5, 36])
def test_with_several_micro_batches_blocks_move_in_turn(blocks: int, on_gpu: int) -> None:
    """The host adds up the gradients of the others in each backward: never many blocks in a row."""
    units = [UNITS[0], *(replace(UNITS[1], name=f"layers.{number}") for number in range(blocks))]
    made = make_plan(units, replace(NEEDS, ring=4), BUDGETS)
    made = made.with_promoted(frozenset(range(1, 1 + min(on_gpu, blocks))), 2, frozenset())
    there = made.placement.promoted
    assert [each.order for each in movable_states(made)] == [each for each in range(1 + blocks) if each not in there]
    moved = [each.order for each in movable_states(made, forwards=8)]
    summed = [each.order for each in summable_units(made, forwards=8)]
    assert sorted(moved) == sorted(summed) == [each for each in range(1 + blocks) if each not in there]
    assert moved[0] == summed[0] == 0  # nothing hides the outer module's update, and its gradient leaves late
    for count in range(1, blocks - len(there)):
        for chosen in (moved[1:][:count], summed[1:][:count]):
            runs = _runs([each in chosen for each in range(1, 1 + blocks) if each not in there])
            assert max(runs) < math.ceil((blocks - len(there)) / 2 ** int(math.log2(count)))


def _runs(chosen: list[bool]) -> list[int]:
    """Return how many follow each other that are not `chosen`."""
    return [len(each) for each in "".join("x" if one else "o" for one in chosen).split("x")]
