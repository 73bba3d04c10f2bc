"""Leases of a ring of bytes: no two share a byte, they come when there is room, and each that the plan allows comes."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from markers import Passing

from ds_slide.errors import SlideError
from ds_slide.plan.allocations import PIECE_ALIGNMENT, whole_pieces
from ds_slide.runtime.core.byte_ring import ByteRing
from ds_slide.runtime.core.device import PASSED
from ds_slide.runtime.core.futures import Failures

Sizes = list[list[int]]
"""The bytes of each piece of each lease."""
SIZES = st.lists(st.lists(st.integers(0, 3 * PIECE_ALIGNMENT + 1), min_size=1, max_size=5), min_size=1, max_size=30)


class Awaited(Passing):
    """Passed when a host thread has waited for it."""

    __slots__ = ()

    def synchronize(self) -> None:
        self.passed = True


def ring(pieces: int, failures: Failures) -> ByteRing:
    return ByteRing(torch.zeros(pieces * PIECE_ALIGNMENT, dtype=torch.uint8), failures, "copies")


def like(*sizes: int) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(0, 12))
def test_a_lease_shares_no_byte_with_one_whose_end_has_not_passed(sizes: Sizes, more: int) -> None:
    """Each has its number in its bytes. All are given back at once, and have their bytes until they are waited for."""
    needed = max(sum(map(whole_pieces, each)) for each in sizes)
    own = ring(max(1, needed // PIECE_ALIGNMENT) + more, Failures())
    leased: list[tuple[list[torch.Tensor], Awaited]] = []
    for number, each in enumerate(sizes):
        pieces, end = own.lease(like(*each)), Awaited()
        assert [piece.numel() for piece in pieces] == each
        for piece in pieces:
            piece.fill_(number)
        own.give_back(end)
        leased.append((pieces, end))
        for of, (earlier, its_end) in enumerate(leased):
            assert its_end.passed or all(bool((piece == of).all()) for piece in earlier)
        waited = [its_end.passed for _, its_end in leased]
        assert waited == sorted(waited, reverse=True)  # the oldest first


def test_nothing_is_waited_for_while_there_is_room() -> None:
    own, ends = ring(4, Failures()), [Awaited() for _ in range(5)]
    for end in ends:
        own.lease(like(PIECE_ALIGNMENT))
        own.give_back(end)
    assert [end.passed for end in ends] == [True, False, False, False, False]


def test_pieces_have_their_data_types_and_begin_aligned() -> None:
    one, other = ring(4, Failures()).lease([torch.empty(3, dtype=torch.bfloat16), torch.empty(2)])
    assert (one.dtype, one.numel(), other.dtype, other.numel()) == (torch.bfloat16, 3, torch.float32, 2)
    assert other.data_ptr() - one.data_ptr() == PIECE_ALIGNMENT


def test_a_lease_waits_for_another_thread_to_give_one_back() -> None:
    own, got = ring(1, Failures()), threading.Event()
    own.lease(like(1))

    def lease() -> None:
        own.lease(like(1))
        got.set()

    thread = threading.Thread(target=lease, daemon=True)
    thread.start()
    assert not got.wait(0.2)
    own.give_back(PASSED)
    assert got.wait(10)


def test_a_failure_ends_the_wait() -> None:
    failures = Failures()
    own, seen = ring(1, failures), []
    own.lease(like(1))

    def lease() -> None:
        with pytest.raises(SlideError, match="the products lane stopped with RuntimeError: broken"):
            own.lease(like(1))
        seen.append(True)

    thread = threading.Thread(target=lease, daemon=True)
    thread.start()
    failures.record("products", RuntimeError("broken"))
    thread.join(10)
    assert seen == [True]
