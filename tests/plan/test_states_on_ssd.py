"""What the disk reads again in a step, beside what was read in steps that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_slide.compression.codec import Identity
from ds_slide.model.layout import ParameterInfo, build_layout
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.low_precision import STATE_FORMATS
from ds_slide.plan.memory import Plan
from ds_slide.plan.needs import Needs, Placement, SsdNeeds, UnitSize
from ds_slide.plan.step_work import StatesOnSsd, _that_stay
from ds_slide.store.state_buffers import optimizer_buffers

torch = pytest.importorskip("torch")

NUMEL = 1 << 20
NEEDS = Needs(held_bytes=2, window=3, ring=2)
SPECS = optimizer_buffers(torch.bfloat16, ADAMW, STATE_FORMATS["fp32"])
STATE_BYTES = 10
"""Of a parameter, without its weight."""


def unit(index: int, chunks: int) -> UnitSize:
    layout = build_layout([ParameterInfo(f"{index}.weight", (chunks * NUMEL,), chunks * NUMEL, 0)], 1)
    kind: Any = "outer" if index == 0 else "block"
    return UnitSize(str(index), layout, Identity(layout, torch.bfloat16), kind, SPECS, 2)


def states_of(
    chunks: Sequence[int], buffers: int, *, held: bool = True, promoted: frozenset[int] = frozenset()
) -> StatesOnSsd:
    """Units with so many chunks, all of them on SSD."""
    needs = replace(NEEDS, ssd=SsdNeeds(True, True, NUMEL, chunk_buffers=buffers), held_bytes=2 if held else 0)
    units = [unit(index, count) for index, count in enumerate(chunks)]
    placement = Placement(chunks_on_ssd=frozenset(range(len(chunks))), promoted=promoted, window=3)
    return StatesOnSsd.of(Plan.of(units, needs, placement))


@pytest.mark.parametrize(
    ("chunks", "stay", "measured"),
    [
        ([2] * 9, 12, 12),
        ([17, *[2] * 18], 12, 10),  # 0.5 B with its embedding
        ([6] * 20, 4, 3),  # 1.5 B, half of its states in memory
        ([28, *[6] * 28], 4, 0),  # all of them on SSD: 2 % of what is read
        ([24] * 27, 0, 0),  # 12 B
    ],
)
def test_as_many_chunks_stay_in_16_buffers_as_were_measured(chunks: list[int], stay: int, measured: int) -> None:
    assert _that_stay(chunks, 16) == stay
    assert 0 <= stay - measured <= 0.25 * 16


def test_chunks_that_all_have_a_buffer_are_not_read_again() -> None:
    assert set(states_of([2, 2, 2], 16).read.values()) == {0}


def test_states_that_went_to_the_gpu_leave_their_buffers_to_the_others() -> None:
    # 18 chunks for 16 buffers, and then 2.
    assert sum(states_of([2] * 9, 16).read.values()) == 6 * NUMEL * STATE_BYTES
    assert states_of([2] * 9, 16, promoted=frozenset(range(8))).read == {8: 0}


@pytest.mark.parametrize("held", [True, False])
def test_what_is_updated_first_stays(held: bool) -> None:
    """By deadline where gradients are held, else as backward finishes the units: the outer ones come last."""
    chunks = [1, 1, 2, 2]
    found = states_of(chunks, 5, held=held).read
    whole = NUMEL * STATE_BYTES
    first = 0 if held else 3
    expected = {index: count * whole for index, count in enumerate(chunks)}
    assert found == expected | {first: (chunks[first] - 1) * whole}


def test_nothing_is_read_without_an_ssd() -> None:
    units = [unit(index, 2) for index in range(3)]
    assert StatesOnSsd.of(Plan.of(units, NEEDS, Placement(window=3))) == StatesOnSsd({}, 0)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 24))
def test_more_buffers_never_read_more(chunks: list[int], buffers: int) -> None:
    fewer, more = (sum(states_of(chunks, count).read.values()) for count in (buffers, buffers + 1))
    assert more <= fewer <= sum(chunks) * NUMEL * STATE_BYTES
