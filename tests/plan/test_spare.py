"""How much GPU memory is spare, and what leaves it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keepable_blocks import movables, windows

from ds_slide.plan.spare import (
    LEAST_AHEAD,
    MOST_AHEAD,
    Input,
    Measured,
    Movable,
    Shape,
    Slots,
    given_back,
    goes_on,
    inputs_missing,
    moved_within,
    moves_unmeasured,
    reads_ahead,
    spare_bytes,
)

GB = 10**9
BLOCKS = 36


def test_what_a_batch_leaves_is_less_what_the_allocator_cannot_use() -> None:
    """Of 24 GB, with a margin of a sixteenth: a fifth of what stays on the GPU lies between live tensors."""
    assert spare_bytes(24 * GB, 5 * GB, 1.5 * GB) == 17.5 * GB
    assert spare_bytes(24 * GB, 15 * GB, 1.5 * GB) == 6 * GB
    assert spare_bytes(20 * GB, 29 * GB, 1.5 * GB) == pytest.approx(-14.8 * GB)


@given(*[st.floats(0, 1e12)] * 3)
def test_what_is_missing_suffices_and_no_more(free: float, needed: float, margin: float) -> None:
    """Whether states make room or inputs, which take a part of the fragments along."""
    states, inputs = max(0.0, -spare_bytes(free, needed, margin)), max(0.0, inputs_missing(free, needed, margin))
    for found in (spare_bytes(free + states, needed, margin), spare_bytes(free, needed - inputs, margin)):
        assert found >= -1.0 and (found <= 1.0 or not states)
    assert inputs <= states + 1.0


@given(movables, st.floats(-5, 400), windows)
def test_as_much_is_given_back_as_is_missing(claimed: list[Movable], missing: float, slots: Slots) -> None:
    gone = given_back(missing, claimed, slots)
    left = [each for each in claimed if each.order not in gone]
    assert left == claimed[: len(left)]

    def freed(count: int) -> int:
        new = max(0, min(slots.least, slots.blocks + count) - slots.count)
        return sum(each.nbytes for each in claimed[len(claimed) - count :]) - new * slots.nbytes

    assert freed(len(gone)) >= missing or not left
    assert all(freed(fewer) < missing for fewer in range(len(gone)))


shapes = st.builds(Shape, st.integers(1, 10**6), st.integers(1, 10**5))


@given(shapes, shapes, st.integers(0, 100), st.integers(0, 100))
def test_growth_bounds_what_is_linear_and_what_is_quadratic(
    known: Shape, other: Shape, a_token: int, a_pair: int
) -> None:
    def square(shape: Shape) -> int:
        return a_pair * shape.tokens * shape.length

    def taken(shape: Shape) -> int:
        return a_token * shape.tokens + square(shape)

    most = Measured(known, taken(known), square(known)).at(other)
    assert taken(other) <= most * (1 + 1e-9)
    if other.length >= known.length:
        assert most == pytest.approx(taken(other))


@pytest.mark.parametrize(
    ("sizes", "is_square"),
    [
        ((2, 8, 96, 96), True),
        ((2, 1, 96, 100), True),  # twenty tokens of a prefix would be too many
        ((192, 2048), False),
        ((2, 96, 2048), False),
        ((2, 8, 96, 64), False),
        ((192, 192), False),  # of a layer, or of tokens of both sequences, which no attention pairs
    ],
)
def test_a_tensor_for_each_pair_of_tokens_is_known_by_its_sizes(sizes: tuple[int, ...], is_square: bool) -> None:
    assert Shape(192, 96).has_square(sizes) is is_square


# The input of a block of a 3 B model, 8 x 2048 tokens.
INPUTS = [Input(order, 67_000_000) for order in range(1, BLOCKS + 1)]


def test_the_inputs_of_the_first_blocks_move_and_no_more_than_are_missing() -> None:
    assert moved_within(0, 100 * GB, INPUTS) == frozenset()
    assert moved_within(100_000_000, 100 * GB, INPUTS) == frozenset((1, 2))
    assert moved_within(100 * GB, 0.5 * GB, INPUTS) == frozenset(range(1, 8))  # as far as host memory reaches
    # Those of the last two would still be on the GPU when the loss is computed.
    assert moved_within(100 * GB, 100 * GB, INPUTS) == frozenset(range(1, BLOCKS - 1))
    assert moved_within(1, 100 * GB, INPUTS[:2]) == frozenset()


def test_the_inputs_of_the_first_blocks_go_on_to_ssd_and_no_more_than_have_to() -> None:
    assert goes_on(INPUTS, 100 * GB) == goes_on((), 0) == frozenset()
    assert goes_on(INPUTS, 0.5 * GB) == frozenset(range(1, BLOCKS - 6))
    assert goes_on(INPUTS, 0) == frozenset(range(1, BLOCKS + 1))


def test_so_many_reads_are_under_way_that_backward_hides_them() -> None:
    assert reads_ahead(0.0, 0.015) == reads_ahead(0.022, 0.0) == reads_ahead(0.022, 0.015) == LEAST_AHEAD
    assert reads_ahead(0.067, 0.015) == 5
    assert reads_ahead(10.0, 0.015) == MOST_AHEAD  # the disk is the bound


def test_what_is_large_for_the_gpu_moves_before_anything_is_measured() -> None:
    assert not moves_unmeasured(BLOCKS * 67_000_000, 20 * GB)
    assert moves_unmeasured(4 * BLOCKS * 67_000_000, 20 * GB)
