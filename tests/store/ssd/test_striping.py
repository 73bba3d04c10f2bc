"""Striping: every byte has exactly one place, and each mount gets its part of every large transfer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_slide.errors import SlideError
from ds_slide.store.ssd.extents import LONGEST_PERIOD, REQUEST_BYTES, Striping

PAGE = 4096
UNIT = 4 * PAGE  # small, so that a few hundred pages hold many periods

weights = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=5)
pages = st.integers(0, 600)


@given(weights, pages, pages)
def test_pieces_cover_a_transfer_once_in_order_and_aligned(weights, first, count):
    striping = Striping(weights, UNIT)
    offset, nbytes = first * PAGE, count * PAGE
    at = 0
    for piece in striping.pieces(offset, nbytes):
        assert piece.start == at
        assert piece.nbytes > 0
        assert piece.file_offset % PAGE == piece.nbytes % PAGE == 0
        at += piece.nbytes
    assert at == nbytes


@given(weights, pages)
def test_no_two_bytes_share_a_place_and_files_have_no_holes(weights, count):
    striping = Striping(weights, UNIT)
    sizes = striping.file_sizes(count * PAGE)
    places = set()
    for page in range(count):
        (piece,) = striping.pieces(page * PAGE, PAGE)
        places.add((piece.file, piece.file_offset))
    assert places == {(file, at) for file, size in enumerate(sizes) for at in range(0, size, PAGE)}
    assert len(places) == count
    assert sum(sizes) == count * PAGE


@given(weights, pages, pages)
def test_a_transfer_lies_where_its_pages_lie(weights, first, count):
    striping = Striping(weights, UNIT)
    of_pages = [striping.pieces((first + page) * PAGE, PAGE)[0][:2] for page in range(count)]
    of_pieces = [
        (piece.file, piece.file_offset + at)
        for piece in striping.pieces(first * PAGE, count * PAGE)
        for at in range(0, piece.nbytes, PAGE)
    ]
    assert of_pieces == of_pages


@given(weights, st.integers(0, 10_000))
@settings(max_examples=60)
def test_every_64_mib_touch_the_mounts_in_the_same_proportion_wherever_they_start(weights, first):
    striping = Striping(weights)
    period = len(striping.pattern) * REQUEST_BYTES
    assert period <= 64 << 20
    nbytes = (64 << 20) // period * period
    got = [0] * len(weights)
    for piece in striping.pieces(first * PAGE, nbytes):
        got[piece.file] += piece.nbytes
    assert got == [round(share * nbytes) for share in striping.shares]


@given(st.lists(st.floats(1.0, 4.0), min_size=1, max_size=4))
def test_the_slowest_mount_delays_a_transfer_by_little(weights):
    """Mounts within a factor of four: at most one unit in LONGEST_PERIOD too many on any of them."""
    striping = Striping(weights)
    ideal = 1 / sum(weights)
    slowest = max(share / weight for share, weight in zip(striping.shares, weights, strict=True))
    assert slowest <= (ideal + 1 / LONGEST_PERIOD / min(weights)) * 1.02
    assert all(striping.shares)


@pytest.mark.parametrize(
    ("weights", "pattern_length", "shares"),
    [([3.0], 1, [1]), ([5, 5], 2, [1 / 2, 1 / 2]), ([3, 1], 4, [3 / 4, 1 / 4]), ([1, 1.01, 0.99], 3, [1 / 3] * 3)],
)
def test_simple_ratios_have_short_patterns(weights, pattern_length, shares):
    striping = Striping(weights)
    assert (len(striping.pattern), striping.shares) == (pattern_length, pytest.approx(shares))


@given(pages, pages)
def test_one_mount_is_the_identity_in_one_piece(first, count):
    pieces = Striping([7.0]).pieces(first * PAGE, count * PAGE)
    assert pieces == ([(0, first * PAGE, 0, count * PAGE)] if count else [])


def test_a_mount_not_worth_waiting_for_gets_nothing():
    striping = Striping([10.0, 0.01])
    assert striping.shares == [1, 0]
    assert striping.file_sizes(1 << 30) == [1 << 30, 0]


@pytest.mark.parametrize("bad", [[], [0.0], [1.0, -1.0], [float("nan")], [float("inf")]])
def test_weights_that_are_no_bandwidths_are_refused(bad):
    with pytest.raises(SlideError, match="positive numbers"):
        Striping(bad)


@pytest.mark.parametrize("unit", [0, -4096, 1000])
def test_units_that_are_not_aligned_are_refused(unit):
    with pytest.raises(SlideError, match="multiple of 4096"):
        Striping([1.0], unit)
