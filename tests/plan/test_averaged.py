"""Gradients that several ranks average from where autograd left them: which these are, and the bytes of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from ds_slide.compression.codec import Identity
from ds_slide.model.layout import ParameterInfo, build_layout
from ds_slide.plan.allocations import AVERAGED, PIECE_BYTES, STAGED, STAGED_PARTS, total
from ds_slide.plan.memory import Budgets, Plan, make_plan
from ds_slide.plan.needs import Needs, UnitSize

HEAD, BLOCK = 128_000, 6_400
PLENTY = 1 << 40
BUDGETS = Budgets(PLENTY, PLENTY, PLENTY, gpu_states=0, gpu_memory=None, host_memory=None)


def unit(
    *numels: int,
    ranks: int = 2,
    kind: Literal["block", "part", "outer"] = "outer",
    frozen: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> UnitSize:
    """Weights of two bytes; `frozen`: so many elements of a parameter that is frozen."""
    infos = [ParameterInfo(f"weight.{index}", (numel,), numel, 0) for index, numel in enumerate(numels)]
    infos += [ParameterInfo("frozen", (frozen,), frozen, None)] if frozen else []
    layout = build_layout(infos, ranks)
    return UnitSize(f"{kind} of {sum(numels)}", layout, Identity(layout, dtype), kind, (), 2)


def plan(head: UnitSize, *, ranks: int = 2, page_locks: bool = True) -> Plan:
    blocks = [replace(unit(BLOCK, ranks=ranks, kind="block"), name=f"blocks.{index}") for index in range(4)]
    needs = Needs(held_bytes=2, window=2, ring=0, world_size=ranks, shares_weights=True, page_locks=page_locks)
    return make_plan([head, *blocks], needs, BUDGETS)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_matrix_that_ranks_divide_without_padding(ranks: int) -> None:
    assert unit(64 * 12, ranks=ranks).is_averaged_in_place
    assert unit(64 * 12, ranks=ranks, frozen=100).is_averaged_in_place  # behind it


@pytest.mark.parametrize(
    "packed",
    [
        unit(HEAD, ranks=1),  # it goes down from where it lies, but no collective reads it
        unit(HEAD, ranks=3),  # the last part is shorter
        unit(HEAD + 2),  # a gap follows each part
        unit(HEAD, 64),
        unit(HEAD, kind="block"),
        unit(HEAD, kind="part"),
        unit(frozen=HEAD),
    ],
)
def test_all_others_are_packed(packed: UnitSize) -> None:
    assert not packed.is_averaged_in_place


def test_the_largest_block_sets_the_buffers_of_two_ranks_and_not_a_head() -> None:
    made = plan(unit(HEAD))
    assert made.entry(STAGED).nbytes == 2 * BLOCK * 2
    assert made.entry(STAGED_PARTS).nbytes == 2 * (BLOCK // 2) * 2
    assert made.entry(AVERAGED).nbytes == HEAD // 2 * 2
    assert total(made.allocations, "gpu", "gradients on their way") == 2 * BLOCK * 3 + HEAD


def test_a_head_with_a_bias_is_packed_as_before() -> None:
    made = plan(unit(HEAD, 64))
    own = HEAD // 2 + 64
    assert made.entry(STAGED).nbytes == 2 * 2 * own * 2
    assert made.entry(STAGED_PARTS).nbytes == 2 * own * 2
    assert made.entry(AVERAGED).nbytes == 0


def test_a_block_that_is_reduced_in_fp32_is_packed_as_autograd_leaves_it() -> None:
    blocks = [replace(unit(BLOCK, kind="block", dtype=torch.float32), name=f"blocks.{index}") for index in range(4)]
    needs = Needs(held_bytes=4, window=2, ring=0, world_size=2, shares_weights=True, page_locks=True)
    made = make_plan(blocks, needs, BUDGETS)
    assert made.entry(STAGED).nbytes == 2 * BLOCK * 2
    assert made.entry(STAGED_PARTS).nbytes == 2 * (BLOCK // 2) * 4
    assert made.entry(AVERAGED).nbytes == 2 * (BLOCK // 2) * 4


SMALL, LARGE = 64 * 12 * 100, 64 * 12 * 100_000
IN_PIECES = [
    (4, True, torch.bfloat16, False),
    (3, True, torch.bfloat16, True),
    (4, False, torch.bfloat16, True),
    (4, True, torch.float32, True),
]


@pytest.mark.parametrize("head", [SMALL, LARGE])
@pytest.mark.parametrize(("ranks", "page_locks", "dtype", "is_copied"), IN_PIECES)
def test_what_is_divided_or_widened_is_copied_in_pieces(
    ranks: int, page_locks: bool, dtype: torch.dtype, is_copied: bool, head: int
) -> None:
    made = plan(unit(head, ranks=ranks, dtype=dtype), ranks=ranks, page_locks=page_locks)
    part = head // ranks * dtype.itemsize
    assert made.entry(AVERAGED).nbytes == part + is_copied * ranks * min(part, PIECE_BYTES)
