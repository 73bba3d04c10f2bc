"""A board between threads, each with a view of its own on the same memory."""

from __future__ import annotations

import mmap
import threading

import pytest

from ds_slide import _native
from ds_slide.errors import SlideError
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.ranks.board import MASK, TEXT_BYTES, Board
from ds_slide.runtime.core.ranks.conductor import Entry, Kind

RANKS, WIDTH, MORE = 2, 3, 4


@pytest.fixture
def boards() -> list[Board]:
    count = RANKS * WIDTH + MORE
    slab = _native.Slab(_native.Generations.bytes(count), False, False)
    texts = mmap.mmap(-1, RANKS * TEXT_BYTES)
    return [Board(_native.Generations(slab, count), texts, rank, RANKS, WIDTH) for rank in range(RANKS)]


def test_each_rank_writes_its_own_row(boards: list[Board]) -> None:
    boards[0].put(1, 7)
    boards[1].put(1, MASK + 2)
    boards[0].put_more(0, 9)
    for board in boards:
        assert [board.get(0, 1), board.get(1, 1), board.get_more(0)] == [7, 1, 9]


def test_a_line_of_text_is_cut_and_replaced(boards: list[Board]) -> None:
    boards[1].write_text("ü" * TEXT_BYTES)
    assert boards[0].text(1).startswith("üüü")
    boards[1].write_text("layers.0")
    assert (boards[0].text(1), boards[0].text(0)) == ("layers.0", "")


def test_what_is_published_ends_a_wait(boards: list[Board]) -> None:
    seen: list[str] = []

    def wait() -> None:
        boards[0].until(lambda: boards[0].get(1, 0) == 2, Failures(), "the other rank")
        seen.append(boards[0].text(1))

    thread = threading.Thread(target=wait)
    thread.start()
    boards[1].publish(0, 1)  # not yet
    boards[1].write_text("here")
    boards[1].publish(0, 2)
    thread.join(30)
    assert seen == ["here"]


@pytest.mark.parametrize("before", [True, False])
def test_a_failure_ends_a_wait(boards: list[Board], before: bool) -> None:
    failures, errors = Failures(), []

    def wait() -> None:
        try:
            boards[0].until(lambda: False, failures, "the other rank")
        except SlideError as error:
            errors.append(str(error))

    if before:
        failures.end("a lane has failed")
    thread = threading.Thread(target=wait)
    thread.start()
    failures.end("a lane has failed")
    thread.join(30)
    assert errors == ["a lane has failed"]


def test_a_wait_is_for_other_ranks(boards: list[Board]) -> None:
    """So that the watchdog ends it when one of them has ended."""
    failures, waits = Failures(), []

    def ready() -> bool:
        waits.extend(failures.waits())
        return bool(waits)

    boards[0].until(ready, failures, "the other ranks in a step")
    assert [(wait.what, wait.for_ranks) for wait in waits] == [("the other ranks in a step", True)]


@pytest.mark.parametrize(
    "entry",
    [
        Entry(Kind.UNIT, engine=255, unit=65535, backward=15, final=True),
        Entry(Kind.UNIT, engine=1, unit=3, backward=2),
        Entry(Kind.END, engine=7),
        Entry(Kind.MEETING),
        Entry(Kind.APART, unit=3),
        Entry(Kind.ORDER, engine=255, backward=15, final=True),
    ],
)
def test_an_entry_fits_in_a_number(entry: Entry) -> None:
    assert 0 <= entry.packed() <= MASK
    assert Entry.of(entry.packed()) == entry
