"""CRC32C of pages: the standard's values from every instruction set, and which page is told to be wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_slide import _native
from ds_slide.store.ssd.page_sums import PageSums

PAGE = 4096
POLYNOMIAL = 0x82F63B78
ISAS = ("auto", "portable", _native.sum_isa())
WORKERS = {threads: _native.Workers(threads, []) for threads in (1, 3)}


def _table() -> np.ndarray:
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, values >> 1 ^ np.uint32(POLYNOMIAL), values >> 1)
    return values


TABLE = _table()


def crc32c(rows: np.ndarray) -> np.ndarray:
    """By definition, a byte at a time: [rows] of uint8 [rows, bytes]."""
    sums = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in rows.T:
        sums = sums >> 8 ^ TABLE[(sums ^ column) & 0xFF]
    return sums ^ np.uint32(0xFFFFFFFF)


def pages_at(alignment: int, pages: int, seed: int) -> np.ndarray:
    """Random bytes [pages, 4096] that begin `alignment` bytes behind a page's beginning."""
    memory = np.empty((pages + 2) * PAGE, np.uint8)
    begin = -memory.ctypes.data % PAGE + alignment
    data = memory[begin : begin + pages * PAGE].reshape(pages, PAGE)
    data[:] = np.random.default_rng(seed).integers(0, 256, data.shape, np.uint8)
    return data


def sums_of(data: np.ndarray, isa: str, threads: int) -> np.ndarray:
    sums = np.full(len(data) + 1, 0xABCDEF, np.uint32)
    _native.page_sums(WORKERS[threads], data.ctypes.data, data.nbytes, sums.ctypes.data, isa)
    assert sums[-1] == 0xABCDEF, "one sum too many"
    return sums[:-1]


def first_wrong(data: np.ndarray, sums: np.ndarray, isa: str = "auto", threads: int = 1) -> int | None:
    return _native.first_wrong_page(WORKERS[threads], data.ctypes.data, data.nbytes, sums.ctypes.data, isa)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
    ids=["zeros", "ones", "up", "down", "digits"],
)
def test_the_reference_gives_the_standards_values(data: bytes, value: int) -> None:
    """RFC 3720, appendix B.4."""
    assert crc32c(np.frombuffer(data, np.uint8)[None])[0] == value


shapes = st.one_of(st.integers(0, 9), st.integers(60, 70), st.integers(120, 200))


@settings(deadline=None, max_examples=30)
@given(pages=shapes, alignment=st.integers(0, PAGE - 1), seed=st.integers(0, 2**32), threads=st.sampled_from((1, 3)))
def test_all_instruction_sets_agree_with_the_reference(pages: int, alignment: int, seed: int, threads: int) -> None:
    """Around the sizes at which pages are taken side by side (4) and shared by threads (64)."""
    data = pages_at(alignment, pages, seed)
    expected = crc32c(data)
    for isa in ISAS:
        assert np.array_equal(sums_of(data, isa, threads), expected), isa
        assert first_wrong(data, expected, isa, threads) is None


@settings(deadline=None, max_examples=30)
@given(data=st.data(), pages=st.integers(1, 200), threads=st.sampled_from((1, 3)))
def test_the_first_damaged_page_is_found(data: st.DataObject, pages: int, threads: int) -> None:
    memory = pages_at(data.draw(st.integers(0, 64)), pages, data.draw(st.integers(0, 2**32)))
    sums = sums_of(memory, "auto", 1)
    damaged = data.draw(st.lists(st.integers(0, pages - 1), min_size=1, max_size=5))
    for page in damaged:
        kind = data.draw(st.sampled_from(("bit", "burst", "zeros")))
        at = data.draw(st.integers(0, PAGE - 1))
        if kind == "bit":
            memory[page, at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "burst":
            memory[page, at : at + 4] ^= 0x5A  # 32 bits at most: every such burst changes a CRC of 32 bits
        else:
            memory[page] = 0
    wrong = crc32c(memory) != sums  # damage of one page twice may be none
    for isa in ISAS:
        assert first_wrong(memory, sums, isa, threads) == (int(wrong.argmax()) if wrong.any() else None)
    if len(set(damaged)) == len(damaged):
        assert wrong.sum() == len(damaged)


def test_a_sum_that_is_not_known_agrees_with_everything() -> None:
    data = pages_at(0, 100, seed=1)
    sums = sums_of(data, "auto", 1)
    sums[[10, 80]] = 0
    data[[10, 80]] ^= 1
    assert first_wrong(data, sums) is None
    data[99] ^= 1
    assert first_wrong(data, sums) == 99


def test_wrong_arguments_are_refused() -> None:
    data = pages_at(0, 1, seed=1)
    sums = np.zeros(1, np.uint32)
    for call in (_native.page_sums, _native.first_wrong_page):
        with pytest.raises(ValueError, match="100 bytes are not a multiple of 4096"):
            call(WORKERS[1], data.ctypes.data, 100, sums.ctypes.data)
        with pytest.raises(ValueError, match='isa is "avx512" but must be one of'):
            call(WORKERS[1], data.ctypes.data, PAGE, sums.ctypes.data, "avx512")  # type: ignore[arg-type]


@pytest.fixture
def kept() -> tuple[PageSums, Callable[[np.ndarray, int], int | None]]:
    """Sums of 100 pages, and the check of what lies at a page of them."""
    sums = PageSums(torch.full((100,), 7, dtype=torch.int32), threads=2)
    return sums, lambda data, page: sums.first_wrong(page * PAGE, data.ctypes.data, data.nbytes)


def test_a_new_store_holds_zeros(kept) -> None:
    _, check = kept
    data = np.zeros((100, PAGE), np.uint8)
    assert check(data, 0) is None
    data[98, 5] = 1
    assert check(data, 0) == 98 * PAGE
    assert check(data[50:98], 50) is None


def test_moved_and_old_pages_are_found(kept) -> None:
    sums, check = kept
    old, new = pages_at(0, 20, seed=1), pages_at(0, 20, seed=2)
    for data in (old, new):
        sums.keep(40 * PAGE, data.ctypes.data, data.nbytes)
    assert check(new, 40) is None
    assert check(new[3:5], 43) is None  # a part of what was written at once
    assert check(new, 41) == 41 * PAGE
    mixed = new.copy()
    mixed[7] = old[7]
    assert check(mixed, 40) == 47 * PAGE
    mixed[7], mixed[8] = new[8].copy(), new[7].copy()
    assert check(mixed, 40) == 47 * PAGE


def test_what_is_written_while_sums_are_off_is_not_known(kept) -> None:
    sums, check = kept
    first, second = pages_at(0, 20, seed=1), pages_at(0, 20, seed=2)
    sums.keep(0, first.ctypes.data, first.nbytes)
    sums.is_on = False
    assert check(second, 0) is None
    sums.keep(5 * PAGE, second.ctypes.data, 5 * PAGE)
    sums.is_on = True
    assert check(second, 0) == 0
    assert check(second[5:10], 5) is None
    assert check(first, 0) is None
    assert check(second[5:11], 5) == 10 * PAGE
    counted = sums.statistics()
    assert counted["checked_bytes"] == (20 + 20 + 5 + 20 + 6) * PAGE and counted["checked_s"] > 0
