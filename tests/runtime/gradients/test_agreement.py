"""What rank 0 enters into the log, by the moments at which it sees the numbers of another rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ds_slide.runtime.core.ranks.conductor import Entry, Kind
from ds_slide.runtime.gradients.agreement import _EXPECTED, _FIRST_UNIT, Agreement

UNITS = 3


class Log:
    """Takes the place of `Conductor` on rank 0."""

    has_one_engine = True

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def enter(self, _agreement: Agreement) -> None: ...
    def announce(self, agreement: Agreement) -> None:
        agreement.lead()
        agreement.follow_order()

    def append(self, entry: Entry) -> None:
        self.entries.append(entry)

    @contextmanager
    def entry(self) -> Iterator[None]:
        yield


class TwoRows:
    """A board of two ranks, as rank 0 sees it. `late`: numbers that rank 1 writes when rank 0 first reads one of its
    units."""

    others = (1,)

    def __init__(self) -> None:
        self.rows: list[dict[int, int]] = [{}, {}]
        self.late: dict[int, int] = {}

    def put(self, item: int, value: int) -> None:
        self.rows[0][item] = value

    def get(self, rank: int, item: int) -> int:
        if rank == 1 and item >= _FIRST_UNIT:
            self.rows[1].update(self.late)
        return self.rows[rank].get(item, 0)


@pytest.fixture
def seen() -> SimpleNamespace:
    """Rank 0 of two, whose last backward had the gradients of units 2, 0 and 1."""
    units = [
        SimpleNamespace(
            order=order,
            spec=SimpleNamespace(kind="outer"),
            trainable=(),
            is_gathered=False,
            gradient=SimpleNamespace(taken=None),
        )
        for order in range(UNITS)
    ]
    taken: list[int] = []
    taking: Any = SimpleNamespace(
        units=units,
        contribution=lambda _unit: SimpleNamespace(gradients=[], staging=None),
        is_final=lambda: True,
        take_agreed=lambda unit, final: taken.append(unit.order),  # noqa: ARG005 - by name
    )
    log, board = Log(), TwoRows()
    context: Any = SimpleNamespace(ranks=SimpleNamespace(engine=0), failures=None)
    agreement = Agreement(log, board, context, taking)  # type: ignore[arg-type]
    for order in (2, 0, 1):
        agreement._expected.note(units[order])  # type: ignore[arg-type]
    agreement.close()
    return SimpleNamespace(agreement=agreement, log=log, board=board, units=units, taken=taken)


def said_by_rank_1(agreement: Agreement, *announced: int) -> dict[int, int]:
    """What rank 1 writes when it expects the same, and has announced these units."""
    expected = dict(zip((_EXPECTED, _EXPECTED + 1), agreement._expected.digest(agreement.backward), strict=True))
    return expected | {_FIRST_UNIT + order: agreement._cell(1) for order in announced}


def test_an_order_that_all_expect_is_entered_once(seen: SimpleNamespace) -> None:
    seen.board.rows[1].update(said_by_rank_1(seen.agreement))
    for order in (2, 0, 1):
        seen.agreement.announce(seen.units[order])
    assert [entry.kind for entry in seen.log.entries] == [Kind.ORDER]
    assert seen.taken == [2, 0, 1]


def test_a_rank_that_says_so_while_rank_0_looks_is_seen(seen: SimpleNamespace) -> None:
    """Rank 0 had looked for the order before, and found the announcement after: it entered units one by one."""
    seen.board.late = said_by_rank_1(seen.agreement, 2)
    for order in (2, 0, 1):
        seen.agreement.announce(seen.units[order])
    assert [entry.kind for entry in seen.log.entries] == [Kind.ORDER]
    assert seen.taken == [2, 0, 1]


def test_units_are_entered_one_by_one_where_a_rank_expects_another_order(seen: SimpleNamespace) -> None:
    seen.board.late = said_by_rank_1(seen.agreement, 2, 0, 1) | {_EXPECTED: 1}
    for order in (2, 0, 1):
        seen.agreement.announce(seen.units[order])
    assert [(entry.kind, entry.unit) for entry in seen.log.entries] == [(Kind.UNIT, 2), (Kind.UNIT, 0), (Kind.UNIT, 1)]
    assert seen.taken == [2, 0, 1]
