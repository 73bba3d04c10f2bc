"""What stays in host memory and what goes to SSD."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_slide.compression.codec import Identity
from ds_slide.errors import SlideError
from ds_slide.model.layout import ParameterInfo, build_layout
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.low_precision import STATE_FORMATS
from ds_slide.plan.allocations import CHUNK_BUFFERS, PIECES, WEIGHT_BUFFERS
from ds_slide.plan.memory import Budgets, Plan, make_plan
from ds_slide.plan.needs import Needs, SsdNeeds, UnitSize
from ds_slide.plan.placement import USABLE_SHARE, place_on_host
from ds_slide.store.ssd.extents import chunk_bytes, sum_table_bytes, unit_extents, whole_pages
from ds_slide.store.state_buffers import optimizer_buffers, optimizer_bytes

SPECS = optimizer_buffers(torch.bfloat16, ADAMW, STATE_FORMATS["fp32"])
CHUNK = 2048
BOTH = SsdNeeds(weights=True, states=True, chunk_numel=CHUNK)
NEEDS = Needs(held_bytes=2, window=2, ring=0, ssd=BOTH)
OUTER, BLOCK, BLOCKS = 64_000, 6_400, 12
PLENTY = 1 << 40


def unit(name: str, numel: int, frozen: int = 0) -> UnitSize:
    infos = [ParameterInfo("weight", (numel,), numel, 0)] if numel else []
    infos += [ParameterInfo("frozen", (frozen,), frozen, None)] if frozen else []
    layout = build_layout(infos, 1)
    codec = Identity(layout, torch.bfloat16)
    return UnitSize(name, layout, codec, "outer" if name.startswith("outer") else "block", SPECS, 2)


UNITS = [unit("outer", OUTER), *(unit(f"blocks.{index}", BLOCK) for index in range(BLOCKS))]
STATES = (OUTER + BLOCKS * BLOCK) * 12
BLOCK_WEIGHTS = BLOCKS * BLOCK * 2
PASSING = PIECES * OUTER * 2
"""Of gradients that pass in pieces."""


@dataclass(frozen=True)
class Placed:
    """A placement and what it takes."""

    weights_on_ssd: frozenset[int]
    chunks_on_ssd: frozenset[int]
    gradients_on_ssd: frozenset[int]
    chunk_buffers: int
    weight_buffers: int
    state_bytes: int
    ssd_bytes: int
    host_bytes: int


def placed_of(
    units: Sequence[UnitSize], needs: Needs, on_gpu: frozenset[int], host_free: int, host_memory: int | None
) -> Placed:
    plan = Plan.of(units, needs, place_on_host(units, needs, on_gpu, host_free, host_memory))
    counts = {each.what: each.count for each in plan.allocations}
    return Placed(
        plan.placement.weights_on_ssd,
        plan.placement.chunks_on_ssd,
        plan.placement.gradients_on_ssd,
        counts.get(CHUNK_BUFFERS, 0),
        counts.get(WEIGHT_BUFFERS, 0),
        plan.host_state_bytes,
        plan.ssd_bytes,
        plan.host_bytes,
    )


def place(host_memory: int | None, needs: Needs = NEEDS, free: int = PLENTY) -> Placed:
    return placed_of(UNITS, needs, frozenset(), free, host_memory)


@pytest.mark.parametrize("budget", [None, STATES, STATES + 1])
def test_what_fits_stays(budget: int | None) -> None:
    placed = place(budget)
    assert not placed.weights_on_ssd and not placed.chunks_on_ssd
    assert placed.ssd_bytes == placed.chunk_buffers == placed.weight_buffers == 0
    assert placed.host_bytes == STATES + (OUTER + BLOCKS * BLOCK) * 2 + PASSING


def test_nothing_allowed_moves_all_that_may() -> None:
    placed = place(0)
    blocks = frozenset(range(1, BLOCKS + 1))
    assert placed.weights_on_ssd == blocks and placed.chunks_on_ssd == blocks | {0}
    assert placed.state_bytes == OUTER * 2  # an outer module's weights are read by nobody but its own update
    assert placed.state_bytes + placed.ssd_bytes == STATES


def test_weights_stay_first_then_the_outer_records_then_the_blocks() -> None:
    outer_weight = OUTER * 2
    assert not place(outer_weight + BLOCK_WEIGHTS).weights_on_ssd
    assert place(outer_weight + BLOCK_WEIGHTS - 1).weights_on_ssd
    assert 0 not in place(outer_weight + BLOCK_WEIGHTS + OUTER * 10).chunks_on_ssd
    assert 0 in place(outer_weight + BLOCK_WEIGHTS + OUTER * 10 - 1).chunks_on_ssd


def test_half_of_the_blocks_are_spread_over_the_model() -> None:
    budget = OUTER * 12 + BLOCK_WEIGHTS + BLOCKS * BLOCK * 10 // 2
    on_ssd = sorted(place(budget).chunks_on_ssd)
    assert len(on_ssd) == BLOCKS // 2
    assert {later - earlier for earlier, later in itertools.pairwise(on_ssd)} == {2}


@pytest.mark.parametrize(("weights", "states"), [(True, False), (False, True)])
def test_only_what_the_devices_name_moves(weights: bool, states: bool) -> None:
    placed = place(0, replace(NEEDS, ssd=replace(BOTH, weights=weights, states=states)))
    assert bool(placed.weights_on_ssd) == weights
    assert bool(placed.chunks_on_ssd) == states


def test_frozen_parameters_have_weights_only_on_ssd() -> None:
    frozen = [unit("outer", OUTER), unit("blocks.0", 0, frozen=BLOCK), unit("blocks.1", BLOCK, frozen=BLOCK)]
    placed = placed_of(frozen, NEEDS, frozenset(), PLENTY, 0)
    assert placed.weights_on_ssd == {1, 2} and placed.chunks_on_ssd == {0, 2}
    assert placed.ssd_bytes == 3 * BLOCK * 2 + BLOCK * 10 + OUTER * 10


@given(
    st.integers(0, STATES + 1000),
    st.sampled_from([0, 2]),
    st.booleans(),
    st.frozensets(st.integers(0, BLOCKS), max_size=4),
    st.sampled_from(sorted(STATE_FORMATS)),
)
def test_the_budget_is_kept_and_every_byte_is_counted(
    budget: int, held: int, movable_weights: bool, on_gpu: frozenset[int], moments: str
) -> None:
    specs = optimizer_buffers(torch.bfloat16, ADAMW, STATE_FORMATS[moments])
    needs = replace(NEEDS, held_bytes=held, ssd=replace(BOTH, weights=movable_weights))
    placed = placed_of([replace(unit, specs=specs) for unit in UNITS], needs, on_gpu, PLENTY, budget)
    on_host = [index for index in range(len(UNITS)) if index not in on_gpu]
    numel = {index: UNITS[index].layout.trainable_numel for index in on_host}
    everything = sum(2 * n + optimizer_bytes(specs, n) for n in numel.values())
    immovable = sum(2 * n for i, n in numel.items() if UNITS[i].is_outer or not movable_weights)
    assert placed.state_bytes <= max(budget, immovable)
    assert placed.state_bytes + placed.ssd_bytes == everything
    assert not on_gpu & (placed.weights_on_ssd | placed.chunks_on_ssd)
    pools = placed.chunk_buffers * (chunk_bytes(specs, CHUNK) if placed.chunks_on_ssd else 0)
    pools += placed.weight_buffers * whole_pages(BLOCK * 2)
    pools += PIECES * 2 * max(numel.values(), default=0)
    assert placed.host_bytes == placed.state_bytes + sum(numel.values()) * held + pools


# With all of weights and states on SSD that may.
LEAST = place(0)


def gradients(free: int, needs: Needs = NEEDS) -> Placed:
    return place(None, needs, int(free / USABLE_SHARE) + 2)


def test_held_gradients_leave_last() -> None:
    assert not gradients(LEAST.host_bytes).gradients_on_ssd
    assert gradients(LEAST.host_bytes).ssd_bytes == LEAST.ssd_bytes
    placed = gradients(LEAST.host_bytes - BLOCK)
    assert placed.gradients_on_ssd
    assert (placed.weights_on_ssd, placed.chunks_on_ssd) == (LEAST.weights_on_ssd, LEAST.chunks_on_ssd)


@pytest.mark.parametrize(("ring", "ring_to_ssd", "held"), [(0, 3, 2), (3, 3, 2), (3, 3, 4)])
def test_as_few_gradients_leave_as_needed_and_their_way_is_counted(ring: int, ring_to_ssd: int, held: int) -> None:
    needs = replace(NEEDS, ring=ring, ring_to_ssd=ring_to_ssd, held_bytes=held)
    in_memory = place(0, needs)
    gone = place(None, needs, free=0)
    assert gone.gradients_on_ssd == frozenset(range(1, BLOCKS + 1))  # an outer module's never leave
    assert gone.ssd_bytes == in_memory.ssd_bytes + BLOCKS * BLOCK * held
    way = whole_pages(BLOCK * held) + ring_to_ssd * whole_pages(BLOCK * 2)
    way -= ring * BLOCK * 2
    assert gone.host_bytes == in_memory.host_bytes - BLOCKS * BLOCK * held + way
    for stay in range(BLOCKS):
        for more in (0, BLOCK * held - 8):
            usable = gone.host_bytes + stay * BLOCK * held + more
            placed = gradients(usable, needs)
            # The way takes memory too: with that of a few gradients, all may as well stay.
            leaving = BLOCKS - stay if usable < in_memory.host_bytes else 0
            assert len(placed.gradients_on_ssd) == leaving
            assert placed.host_bytes <= usable
            assert placed.ssd_bytes + placed.state_bytes == STATES + leaving * BLOCK * held
    some = sorted(gradients(gone.host_bytes + BLOCKS // 3 * BLOCK * held, needs).gradients_on_ssd)
    stay = [index for index in range(1, BLOCKS + 1) if index not in some]
    assert {later - earlier for earlier, later in itertools.pairwise(stay)} == {3}


def test_gradients_stay_where_optimizer_states_must() -> None:
    needs = replace(NEEDS, ssd=replace(BOTH, states=False))
    assert not place(None, needs, free=0).gradients_on_ssd
    budgets = Budgets(PLENTY, PLENTY, 1, gpu_states=0, gpu_memory=None, host_memory=None)
    with pytest.raises(SlideError, match=r"change zero_optimization.offload_optimizer.device \(to \"nvme\".*gradients"):
        make_plan(UNITS, needs, budgets)
    with pytest.raises(SlideError, match=r"change ds_slide.host_memory"):
        make_plan(UNITS, NEEDS, budgets)


def test_gradients_that_are_not_held_go_nowhere() -> None:
    needs = replace(NEEDS, held_bytes=0, ring=4, ring_to_ssd=4)
    assert place(None, needs, free=0).gradients_on_ssd == frozenset()
    assert place(None, needs, free=0).host_bytes == place(0, needs).host_bytes


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_checksums_are_counted_and_fit(share: float) -> None:
    """Those of the pages that the units get on SSD, within what is free; also where held gradients have to leave."""
    needs = replace(NEEDS, ssd=replace(BOTH, checksums=True))

    def sums(placed: Placed) -> int:
        extents = [
            unit_extents(
                0,
                SPECS,
                weight_bytes=BLOCK * 2 if index in placed.weights_on_ssd else 0,
                chunks_of=each.layout.trainable_numel if index in placed.chunks_on_ssd else 0,
                chunk_numel=CHUNK,
                gradient_bytes=BLOCK * 2 if index in placed.gradients_on_ssd else 0,
            )
            for index, each in enumerate(UNITS)
        ]
        return sum_table_bytes(sum(place.end for place in extents))

    least = place(0, needs).host_bytes
    placed = gradients(int(least + share * STATES), needs)
    pools = placed.chunk_buffers * chunk_bytes(SPECS, CHUNK) + placed.weight_buffers * whole_pages(BLOCK * 2)
    held = (OUTER + BLOCKS * BLOCK) * 2 + PASSING
    assert placed.host_bytes == placed.state_bytes + held + pools + sums(placed) <= least + share * STATES
    assert placed.ssd_bytes > 0 and not placed.gradients_on_ssd
    gone, without = place(None, needs, free=0), place(None, free=0)
    assert len(gone.gradients_on_ssd) == BLOCKS
    assert gone.host_bytes - without.host_bytes == sums(gone) > 0


def test_free_memory_sets_the_default_budget() -> None:
    free = STATES * 2 // 3
    placed = place(None, free=free)
    assert placed.ssd_bytes > 0
    assert placed.host_bytes <= free
