"""Which shapes are recorded: those that come often, and no more than a fixed number."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_slide.plan.spare import Shape
from ds_slide.runtime.captured.shapes import RECORDED, STEADY, WINDOW, SeenShape, Shapes


def come(shapes: Shapes, length: int) -> tuple[SeenShape, Any]:
    """A forward of a batch, which records it if it is due. -> the recordings that went for it."""
    gone, seen = None, shapes.see(Shape(length, length))
    if seen.recordings is None and shapes.is_due(seen):
        seen.recordings: Any = f"of {length}"
        gone = shapes.make_place()
    return seen, gone


def test_a_shape_is_due_when_it_has_come_several_times() -> None:
    shapes = Shapes()
    assert [come(shapes, 8)[0].recordings for _ in range(STEADY + 2)] == [None] * STEADY + ["of 8"] * 2


@given(st.lists(st.integers(1, 80), max_size=400))
def test_the_table_is_bounded(lengths: list[int]) -> None:
    shapes = Shapes()
    for length in lengths:
        before = {id(each) for each in shapes.recorded}
        seen, gone = come(shapes, length)
        assert len(shapes._seen) <= 2 * RECORDED
        assert len(shapes.recorded) <= RECORDED
        assert list(shapes._seen.values())[-1] is seen
        after = {id(each) for each in shapes.recorded}
        assert len(before - after) == (gone is not None), "recordings that nobody frees"


def full() -> Shapes:
    """All that may have recordings have some."""
    shapes = Shapes()
    for length in range(1, RECORDED + 1):
        for _ in range(STEADY + 1):
            come(shapes, length)
    assert len(shapes.recorded) == RECORDED
    return shapes


def test_a_recorded_shape_that_comes_no_more_makes_place() -> None:
    shapes = full()
    assert [come(shapes, 100)[1] for _ in range(STEADY + 1)] == [None] * STEADY + ["of 1"]
    come(shapes, 2)  # the third comes longest ago now
    assert [come(shapes, 101)[1] for _ in range(STEADY + 1)] == [None] * STEADY + ["of 3"]


def test_recorded_shapes_that_come_as_often_stay() -> None:
    shapes = full()
    for _ in range(5 * STEADY):
        for length in (100, 101, *range(1, RECORDED + 1)):
            assert come(shapes, length)[1] is None


@pytest.mark.parametrize(("lengths", "least"), [(RECORDED, 0.95), (2 * RECORDED, 0.4)])
def test_batches_of_few_lengths_are_replayed(lengths: int, least: float) -> None:
    """And recordings are not made in vain."""
    shapes, numbers = Shapes(), random.Random(0)
    replayed = recorded = 0
    for _ in range(4000):
        before = len(shapes.recorded)
        seen, gone = come(shapes, numbers.randint(1, lengths))
        is_new = len(shapes.recorded) > before or gone is not None
        recorded += is_new
        replayed += seen.recordings is not None and not is_new
    assert replayed > least * 4000
    assert replayed > 20 * recorded


def test_lengths_that_hardly_come_again_are_not_recorded() -> None:
    shapes, numbers = Shapes(), random.Random(0)
    found = [come(shapes, numbers.randint(1, 2000))[0].recordings for _ in range(5000)]
    assert not any(found)


def test_a_shape_waits_for_the_host_if_most_blocks_of_its_last_forward_do() -> None:
    seen = SeenShape(1, 1)
    for behind, waits in (([True, False, False], True), ([True, False], False), ([], False)):
        for each in behind:
            seen.note_issue(is_behind=each)
        seen.come(2)
        assert seen.waited is waits


@pytest.mark.parametrize(("lengths", "behind", "strangers"), [(64, 1, 64), (64, 2, 0), (32, 1, 0), (33, 1, 33)])
def test_shapes_that_hardly_come_again_are_counted_where_they_wait_for_the_host(
    lengths: int, behind: int, strangers: int
) -> None:
    """`behind`: in how many of three blocks the device is behind the host."""
    shapes = Shapes()
    for number in range(2 * WINDOW):
        shape = Shape(number % lengths, 1)
        seen = shapes.see(shape)
        for block in range(3):
            seen.note_issue(is_behind=block < behind)
        shapes.note(shape)
        assert number >= WINDOW // 2 or not shapes.strangers
    assert shapes.strangers == strangers


def test_forwards_that_replay_recordings_do_not_count_as_waiting() -> None:
    shapes: Any = Shapes()
    for number in range(WINDOW):
        shape = Shape(number, 1)
        seen = shapes.see(shape)
        seen.recordings = object()
        seen.note_issue(is_behind=False)
        shapes.note(shape)
        seen.recordings = None
    assert not shapes.strangers
