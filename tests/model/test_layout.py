"""Properties of the flat layout that every lane relies on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_slide.model.layout import (
    ALIGNMENT,
    Entry,
    ParameterInfo,
    Segment,
    UnitLayout,
    build_layout,
    piece,
    pieces,
    with_later,
)

# No deadline: a loaded machine is slow, not wrong.
properties = settings(deadline=None, max_examples=50)

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
groups = st.none() | st.integers(0, 3)
world_sizes = st.integers(1, 9)


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[ParameterInfo]:
    drawn = draw(st.lists(st.tuples(shapes, groups), max_size=12))
    return [ParameterInfo(f"p{i}", shape, math.prod(shape), group) for i, (shape, group) in enumerate(drawn)]


@st.composite
def byte_lists(draw: st.DrawFn) -> list[ParameterInfo]:
    """Frozen tensors of any data type."""
    dtypes = st.sampled_from([torch.bool, torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.int32, torch.float64])
    drawn = draw(st.lists(st.tuples(shapes, dtypes), max_size=6))
    return [ParameterInfo(f"b{i}", shape, math.prod(shape), None, dtype) for i, (shape, dtype) in enumerate(drawn)]


def ranges(layout: UnitLayout, space: str) -> list[tuple[int, int]]:
    """Used [start, stop) of every entry in the local state buffers or in the slot."""
    if space == "local":
        return [(entry.place.start, entry.place.stop) for entry in layout.entries]
    return [(entry.slot_place.start, entry.slot_place.stop) for entry in layout.entries]


def assert_packed(used: list[tuple[int, int]], total: int) -> None:
    """Ranges do not overlap, start aligned, and leave no more than alignment padding between each other."""
    end = 0
    for start, stop in used:
        assert start % ALIGNMENT == 0
        assert 0 <= start - end < ALIGNMENT
        end = stop
    assert total % ALIGNMENT == 0
    assert 0 <= total - end < ALIGNMENT


@properties
@given(parameter_lists(), world_sizes)
def test_entries_are_packed_and_aligned(parameters: list[ParameterInfo], world_size: int) -> None:
    layout = build_layout(parameters, world_size)
    assert_packed(ranges(layout, "local"), layout.local_numel)
    assert_packed(ranges(layout, "slot"), layout.slot_numel)
    assert layout.trainable_numel % ALIGNMENT == 0
    assert layout.slot_trainable_numel % ALIGNMENT == 0


@properties
@given(parameter_lists(), world_sizes)
def test_every_parameter_has_one_entry_sorted_by_group(parameters: list[ParameterInfo], world_size: int) -> None:
    layout = build_layout(parameters, world_size)
    described = [ParameterInfo(e.name, e.shape, e.numel, e.group) for e in layout.entries]
    assert described == [p for group in (0, 1, 2, 3, None) for p in parameters if p.group == group]
    for entry in layout.entries:
        assert entry.partition_numel == math.ceil(entry.numel / world_size)
        assert entry.trainable == (entry.group is not None)


@properties
@given(parameter_lists(), world_sizes)
def test_trainable_entries_are_the_front_of_both_spaces(parameters: list[ParameterInfo], world_size: int) -> None:
    layout = build_layout(parameters, world_size)
    for entry in layout.entries:
        assert (entry.offset < layout.trainable_numel) == entry.trainable or entry.numel == 0
        assert (entry.slot_offset < layout.slot_trainable_numel) == entry.trainable or entry.numel == 0
    only_trainable = build_layout([p for p in parameters if p.group is not None], world_size)
    assert layout.trainable_numel == only_trainable.local_numel
    assert layout.slot_trainable_numel == only_trainable.slot_numel


@properties
@given(parameter_lists(), world_sizes)
def test_pieces_of_all_ranks_tile_the_parameter(parameters: list[ParameterInfo], world_size: int) -> None:
    for entry in build_layout(parameters, world_size).entries:
        pieces = [piece(entry, rank) for rank in range(world_size)]
        assert [element for start, stop in pieces for element in range(start, stop)] == list(range(entry.numel))
        assert all(0 <= start <= stop <= min(start + entry.partition_numel, entry.numel) for start, stop in pieces)


@properties
@given(parameter_lists(), world_sizes)
def test_segments_cover_the_trainable_range_with_the_right_group(
    parameters: list[ParameterInfo], world_size: int
) -> None:
    layout = build_layout(parameters, world_size)
    end = 0
    for segment in layout.segments:
        assert segment.start == end
        assert segment.stop > segment.start
        end = segment.stop
    assert end == layout.trainable_numel
    assert len({segment.group for segment in layout.segments}) == len(layout.segments)
    for entry in layout.entries:
        if entry.trainable and entry.numel:
            (segment,) = [s for s in layout.segments if s.start <= entry.offset < s.stop]
            assert segment.group == entry.group
            assert entry.offset + entry.partition_numel <= segment.stop


@properties
@given(parameter_lists())
def test_one_rank_has_one_address_space(parameters: list[ParameterInfo]) -> None:
    layout = build_layout(parameters, 1)
    assert all(entry.offset == entry.slot_offset for entry in layout.entries)
    assert all(piece(entry, 0) == (0, entry.numel) for entry in layout.entries)
    assert layout.local_numel == layout.slot_numel
    assert layout.trainable_numel == layout.slot_trainable_numel


@properties
@given(parameter_lists(), world_sizes)
def test_gathering_the_state_buffers_of_all_ranks_gives_the_slot(
    parameters: list[ParameterInfo], world_size: int
) -> None:
    """The rule of the module docstring, carried out: rank-major buffer -> slot."""
    layout = build_layout(parameters, world_size)
    gathered: list[object] = [None] * (world_size * layout.local_numel)
    for rank in range(world_size):
        for entry in layout.entries:
            for position, element in enumerate(range(*piece(entry, rank))):
                gathered[rank * layout.local_numel + entry.offset + position] = (entry.name, element)
    slot: list[object] = [None] * layout.slot_numel
    for rank in range(world_size):
        for entry in layout.entries:
            start, stop = piece(entry, rank)
            source = rank * layout.local_numel + entry.offset
            slot[entry.slot_offset + start : entry.slot_offset + stop] = gathered[source : source + stop - start]
    for entry in layout.entries:
        expected = [(entry.name, element) for element in range(entry.numel)]
        assert slot[entry.slot_offset : entry.slot_offset + entry.numel] == expected
    assert len(slot) == layout.slot_numel


@properties
@given(parameter_lists(), parameter_lists(), world_sizes)
def test_later_parameters_shift_nothing(
    parameters: list[ParameterInfo], later: list[ParameterInfo], world_size: int
) -> None:
    """Entries of group 0 stay where they are whatever follows: strides depend on sizes alone."""
    first = [replace(p, group=0) for p in parameters]
    alone = build_layout(first, world_size)
    together = build_layout(first + [replace(p, name=f"later.{p.name}") for p in later], world_size)
    assert together.entries[: len(first)] == alone.entries


def test_worked_example() -> None:
    """Numbers by hand: 2 ranks, a frozen matrix in the middle, groups out of order."""
    layout = build_layout(
        [
            ParameterInfo("weight", (10, 13), 130, 1),
            ParameterInfo("frozen", (100,), 100, None),
            ParameterInfo("bias", (3,), 3, 0),
            ParameterInfo("scale", (), 1, 1),
        ],
        world_size=2,
    )
    assert layout == UnitLayout(
        entries=(
            Entry("bias", (3,), 3, 0, partition_numel=2, offset=0, slot_offset=0),
            Entry("weight", (10, 13), 130, 1, partition_numel=65, offset=64, slot_offset=64),
            Entry("scale", (), 1, 1, partition_numel=1, offset=192, slot_offset=256),
            Entry("frozen", (100,), 100, None, partition_numel=50, offset=256, slot_offset=320),
        ),
        world_size=2,
        trainable_numel=256,
        local_numel=320,
        slot_trainable_numel=320,
        slot_numel=448,
        segments=(Segment(0, 0, 64), Segment(1, 64, 256)),
    )
    assert [piece(layout.entries[0], rank) for rank in range(2)] == [(0, 2), (2, 3)]
    assert [piece(layout.entries[2], rank) for rank in range(2)] == [(0, 1), (1, 1)]


def test_group_without_elements_has_no_segment() -> None:
    layout = build_layout([ParameterInfo("empty", (0, 4), 0, 0), ParameterInfo("weight", (4,), 4, 1)], 2)
    assert layout.segments == (Segment(1, 0, 64),)
    assert layout.entries[0].offset == layout.entries[1].offset == 0


def test_ranks_beyond_the_parameter_hold_nothing() -> None:
    """5 elements on 4 ranks: partitions of 2, so the last rank's would start behind the end."""
    (entry,) = build_layout([ParameterInfo("bias", (5,), 5, 0)], 4).entries
    assert [piece(entry, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_no_parameters() -> None:
    assert build_layout([], 4) == UnitLayout((), 4, 0, 0, 0, 0, ())


def test_world_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="world_size is 0"):
        build_layout([], 0)


@properties
@given(parameter_lists(), world_sizes, st.data())
def test_what_is_trainable_later_follows_what_was(
    parameters: list[ParameterInfo], world_size: int, data: st.DataObject
) -> None:
    before = build_layout(parameters, world_size)
    frozen = [entry.name for entry in before.entries if not entry.trainable]
    later = {name: data.draw(st.integers(0, 3)) for name in frozen if data.draw(st.booleans())}
    after, trained = with_later(before, later), len(before.entries) - len(frozen)
    assert after.entries[:trained] == before.entries[:trained]
    assert {entry.name: entry.group for entry in after.entries} == {
        entry.name: later.get(entry.name, entry.group) for entry in before.entries
    }
    assert (after.local_numel, after.slot_numel) == (before.local_numel, before.slot_numel)
    assert_packed(ranges(after, "local"), after.local_numel)
    assert_packed(ranges(after, "slot"), after.slot_numel)
    covered = [(segment.start, segment.stop) for segment in after.segments]
    assert [start for start, _ in covered] == [0, *(stop for _, stop in covered)][: len(covered)]
    assert (covered[-1][1] if covered else 0) == after.trainable_numel


@properties
@given(parameter_lists(), byte_lists(), world_sizes, st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
def test_tensors_of_any_data_type_come_back_from_their_bytes(
    parameters: list[ParameterInfo], frozen: list[ParameterInfo], world_size: int, unit_dtype: torch.dtype
) -> None:
    """Each rank stores its part of every tensor, and the slot that is filled with all parts has the whole ones."""
    layout = build_layout([*parameters, *frozen], world_size, unit_dtype.itemsize)
    assert_packed(ranges(layout, "local"), layout.local_numel)
    assert_packed(ranges(layout, "slot"), layout.slot_numel)
    tensors = {
        info.name: torch.randint(0, 2, (info.numel * (info.dtype or unit_dtype).itemsize,), dtype=torch.uint8)
        .view(info.dtype or unit_dtype)
        .view(info.shape)
        for info in (*parameters, *frozen)
    }
    parts = [torch.zeros(layout.local_numel, dtype=unit_dtype) for _ in range(world_size)]
    for rank, part in enumerate(parts):
        for entry in layout.entries:
            start, stop = piece(entry, rank)
            items = entry.stored(tensors[entry.name].reshape(-1)[start:stop], unit_dtype)
            assert items.numel() <= entry.place.stop - entry.place.start
            part[entry.offset : entry.offset + items.numel()] = items
    slot = torch.zeros(layout.slot_numel, dtype=unit_dtype)
    for rank, source, place in pieces(layout):
        slot[place] = parts[rank][source]
    for entry in layout.entries:
        found = entry.viewed(slot[entry.slot_place], entry.numel).view(entry.shape)
        expected = tensors[entry.name]
        assert found.dtype == expected.dtype
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_carried_tensors_lie_behind_the_parameters() -> None:
    trained, beside = ParameterInfo("trained", (3,), 3, 0), ParameterInfo("beside", (5,), 5, None, torch.int32)
    layout = build_layout([trained], 1, 2, [beside])
    assert [entry.name for entry in layout.entries] == ["trained"]
    (entry,) = layout.carried
    assert entry.place == slice(ALIGNMENT, ALIGNMENT + 10) and layout.local_numel == 2 * ALIGNMENT
    assert with_later(layout, {}) == layout
    layout = build_layout([trained], 2, 2, [beside])
    (entry,) = layout.carried
    assert entry.place == slice(ALIGNMENT, ALIGNMENT + 6) and entry.slot_place.stop - entry.slot_place.start == 10
    assert [(rank, place) for rank, own, place in pieces(layout) if own.start == ALIGNMENT] == [
        (0, slice(ALIGNMENT, ALIGNMENT + 6)),
        (1, slice(ALIGNMENT + 6, ALIGNMENT + 10)),
    ]


@properties
@given(parameter_lists(), st.lists(st.integers(1, 9), max_size=3), world_sizes)
def test_experts_come_last_and_can_be_left_out(infos: list[ParameterInfo], counts: list[int], world_size: int) -> None:
    """What is in front of them has the places that it has without them."""
    experts = [ParameterInfo(f"e{i}", (n, 3, 5), 15 * n, None, of_experts=True) for i, n in enumerate(counts)]
    whole = build_layout([*experts, *infos], world_size)
    alone = build_layout(infos, world_size)
    front = whole.without_experts()
    assert [entry.name for entry in whole.experts] == [info.name for info in experts]
    assert whole.expert_numel == len(experts) * ALIGNMENT
    assert (front.entries, front.local_numel, front.slot_numel) == (alone.entries, alone.local_numel, alone.slot_numel)
    assert (front.segments, front.trainable_numel) == (alone.segments, alone.trainable_numel)


def test_a_trained_expert_does_not_move_by_itself() -> None:
    infos = [ParameterInfo(f"e{i}", (4, 3, 5), 60, None, of_experts=True) for i in range(2)]
    later = with_later(build_layout(infos, 1), {"e1": 0})
    assert [entry.name for entry in later.entries] == ["e1", "e0"]
    assert [entry.name for entry in later.experts] == ["e0"]
