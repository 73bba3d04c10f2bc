"""Agreement of ranks that may run different modules on the units that have gradients in a backward.

A rank announces a unit when the unit's gradient is complete there, and keeps the gradient until the log of rank 0
(`ds_slide.runtime.core.ranks.conductor`) says that it is averaged: at once where all ranks announce it, at the end of
backward where some do not. The others contribute zeros, so that the average is the same as DDP's with
`find_unused_parameters`. A unit without a gradient on any rank is treated as with one rank, alike on all of them.

Ranks that run the same modules announce the same units in the same order, backward after backward. A rank that begins a
backward of the same blocks as the last one expects that order, and says so. Where all ranks do, rank 0 enters it as a
whole, and each rank averages its gradients when it has them, in that order. The results are the same.

A gradient that waits lies in a staging buffer if one is free, and otherwise where autograd left it. One buffer stays
free for units that are averaged meanwhile. A gradient that is averaged from where autograd left it waits there. A unit
that is used again after its announcement is announced again: its contributions are averaged one by one, and a rank with
fewer contributions adds zeros.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.ranks.board import Board
from ds_slide.runtime.core.ranks.conductor import TAG, Conductor, Entry, Kind
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.gradients.sources import Staging

if TYPE_CHECKING:
    from ds_slide.runtime.gradients.taking import Taking


@dataclass(frozen=True)
class Contribution:
    """The gradients of a unit, as autograd left them or packed."""

    gradients: list[torch.Tensor | None]
    staging: Staging | None = None


MOST = 255
"""The most contributions of a unit to one backward. All gradients after the last but one are added up as the last."""
_ENDED, _EXPECTED, _FIRST_UNIT = 0, 1, 3


class Agreement:
    """The announcements of one rank of an engine. `taking` takes its gradients. Called by the thread that computes."""

    def __init__(self, conductor: Conductor, board: Board, context: Context, taking: Taking) -> None:
        self.engine = context.ranks.engine
        self._conductor = conductor
        self._board = board
        self._units = units = taking.units
        self._taking = taking
        self._failures = context.failures
        self.backward = 1
        self._announced = [0] * len(units)
        self._averaged = [0] * len(units)
        """Contributions of units to this backward that are averaged, by `Unit.order`."""
        self._waiting: dict[int, deque[Contribution]] = {}
        """Contributions that are not averaged yet."""
        self._expected = ExpectedOrder(units)
        self._left: deque[int] = deque()
        """Units of the expected order that are not averaged yet."""
        self._left_of = Entry(Kind.ORDER)
        """The entry of that order."""
        self._has_come_to_end = False
        conductor.enter(self)

    @staticmethod
    def width(num_units: int) -> int:
        """Return the count of numbers in a row of the board."""
        return _FIRST_UNIT + num_units

    @property
    def is_open(self) -> bool:
        """Whether this rank has announced anything in the backward that has not ended."""
        return any(self._announced)

    # ---- under backward ----------------------------------------------------------------------------------------------

    def announce(self, unit: Unit, *, at_end: bool = False) -> None:
        """Take the gradients out of the unit's parameters, to be averaged when all ranks have them. `at_end`: backward
        has ended, and nothing more comes."""
        count = self._announced[unit.order] + 1
        if count >= MOST and not at_end:
            return
        if not self.is_open:
            self._say_expected()
        self._expected.note(unit)
        self._waiting.setdefault(unit.order, deque()).append(self._taking.contribution(unit))
        self._announced[unit.order] = count
        unit.gradient.is_postponed = True
        self._board.put(_FIRST_UNIT + unit.order, self._cell(count))
        self._conductor.announce(self)

    def look(self) -> None:
        """Average all gradients that can be, and let ranks that are behind catch up where many wait."""
        self._conductor.look()
        self._conductor.keep_pace(len(self._waiting), self._failures)

    def end(self) -> None:
        """Average the gradients left on any rank, with all ranks. This rank has announced all of its own."""
        self._has_come_to_end = True
        self.finish_order()
        self._board.put(_ENDED, self.backward)
        self._conductor.end(self, self._failures)

    def abandon(self) -> None:
        """Drop the announced gradients of a backward that has not ended. Entries that rank 0 makes before it comes to
        this place of the program are averaged and dropped."""
        if self.is_open:
            self.finish_order()
            self._expected.forget_noted()
            self._end_backward()

    def leave(self) -> None:
        self._conductor.leave(self)

    def _cell(self, count: int) -> int:
        return self.backward << 8 | count

    def _count(self, rank: int, order: int) -> int:
        cell = self._board.get(rank, _FIRST_UNIT + order)
        return cell & 255 if cell >> 8 == self.backward & 0xFFFFFF else 0

    # ---- the order that all ranks expect -----------------------------------------------------------------------------

    def _say_expected(self) -> None:
        """Tell the other ranks which order this rank expects in the backward that begins."""
        first, second = self._expected.digest(self.backward) if self._conductor.has_one_engine else (0, 0)
        self._board.put(_EXPECTED, first)
        self._board.put(_EXPECTED + 1, second)

    def _all_expect_the_same(self) -> bool:
        """Whether all ranks have said, in this backward, that they expect the order of rank 0."""
        said = [
            (self._board.get(rank, _EXPECTED), self._board.get(rank, _EXPECTED + 1))
            for rank in (0, *self._board.others)
        ]
        return self.is_open and any(said[0]) and len(set(said)) == 1

    def _enter_order(self) -> bool:
        """Enter the order that all ranks expect, once in a backward. -> whether it is entered now. On rank 0."""
        if any(self._averaged) or not self._all_expect_the_same():
            return False
        entry = Entry(Kind.ORDER, self.engine, backward=self.backward & TAG, final=self._taking.is_final())
        self._conductor.append(entry)
        self.begin_order(entry)
        return True

    @property
    def has_order_left(self) -> bool:
        return bool(self._left)

    def begin_order(self, entry: Entry) -> None:
        """Average the units of the expected order from now on. At once where this rank has come to the end of that
        backward, or has left it."""
        self._left_of = entry
        self._left.extend(self._expected.order)
        if self._has_come_to_end or entry.backward != self.backward & TAG:
            self.finish_order()
        else:
            self.follow_order()

    def follow_order(self) -> None:
        """Average the next units of the order, as far as this rank has announced them."""
        while self._left and self._left[0] in self._waiting:
            self._average_next()

    def finish_order(self) -> None:
        """Average the rest of the order, with zeros where this rank has nothing."""
        while self._left:
            self._average_next()

    def _average_next(self) -> None:
        order, of = self._left.popleft(), self._left_of
        self.average(Entry(Kind.UNIT, self.engine, order, of.backward, of.final))

    # ---- what the log makes of it ------------------------------------------------------------------------------------

    def lead(self) -> None:
        """Enter and average the units that all ranks have announced, or the order that all expect. On rank 0."""
        if not self._left:
            self._enter_order()
        if self._left:
            return
        others = self._board.others
        for order in tuple(self._waiting):
            while self._averaged[order] < self._announced[order] and all(
                self._count(rank, order) > self._averaged[order] for rank in others
            ):
                # The last rank may have said what it expects, and announced this unit, since the order was looked for.
                if self._enter_order():
                    return
                self._enter(order)

    def lead_end(self) -> None:
        """Enter and average all remaining contributions, in the order of the units. On rank 0."""
        ranks = [0, *self._board.others]
        for unit in self._units:
            most = max(self._count(rank, unit.order) for rank in ranks)
            if not most and self._taking.counts_as_zero(unit):
                most = 1
            while self._averaged[unit.order] < most:
                self._enter(unit.order)

    def _enter(self, order: int) -> None:
        entry = Entry(Kind.UNIT, self.engine, order, self.backward & TAG, self._taking.is_final())
        self._conductor.append(entry)
        self.average(entry)

    def average(self, entry: Entry) -> None:
        """Take part in an entry for a unit, with zeros where this rank has nothing."""
        unit = self._units[entry.unit]
        is_dropped = entry.backward != self.backward & TAG
        waiting = None if is_dropped else self._waiting.get(unit.order)
        if not is_dropped:
            self._averaged[unit.order] += 1
        contribution = waiting.popleft() if waiting else Contribution([None] * len(unit.trainable))
        unit.gradient.taken, unit.gradient.staging = contribution.gradients, contribution.staging
        if waiting is not None and not waiting:
            del self._waiting[unit.order]
            unit.gradient.is_postponed = False
        try:
            with self._conductor.entry():
                self._taking.take_agreed(unit, final=entry.final)
        finally:
            unit.gradient.taken = unit.gradient.staging = None
        if is_dropped:
            self._taking.forget_agreed(unit)

    def is_settled(self) -> bool:
        """Whether this rank has announced and averaged all units, in a backward that none follows before the step."""
        if not self.is_open or self._waiting or not self._taking.is_only():
            return False
        return not any(self._taking.counts_as_zero(unit) for unit in self._units)

    def has_ended(self, rank: int) -> bool:
        """Whether that rank waits at the end of the backward that is open here."""
        return self._board.get(rank, _ENDED) == self.backward & 0xFFFFFFFF

    def close(self) -> None:
        """End the backward, which has ended on all ranks."""
        self._expected.adopt_noted()
        self._end_backward()

    def _end_backward(self) -> None:
        for order, contributions in self._waiting.items():
            self._units[order].gradient.is_postponed = False
            for contribution in contributions:
                self._taking.drop_contribution(contribution)
        self._waiting.clear()
        self._announced = [0] * len(self._units)
        self._averaged = [0] * len(self._units)
        self._has_come_to_end = False
        self.backward += 1

    def joined(self) -> None:
        """End a backward whose end is all that this rank took part in."""
        self._taking.end_joined_backward()


class ExpectedOrder:
    """The order that one rank expects. Called by the thread that computes."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.order: tuple[int, ...] = ()
        """`Unit.order` of the units of the last backward that ended, in the order of their gradients. Empty where a
        unit had several gradients, so that there is no order."""
        self._noted: list[int] = []

    def note(self, unit: Unit) -> None:
        """Note that the unit has a gradient now."""
        self._noted.append(unit.order)

    def adopt_noted(self) -> None:
        """Expect the next backward to be like this one, which has ended."""
        is_order = len(set(self._noted)) == len(self._noted)
        self.order = tuple(self._noted) if is_order else ()
        self._noted = []

    def forget_noted(self) -> None:
        """Forget the backward, which an exception has ended here; other ranks may still be in it."""
        self._noted = []

    def digest(self, backward: int) -> tuple[int, int]:
        """Return 64 bits of a digest of the order and of the number of the backward that begins, in two halves. (0, 0)
        where no order is expected, or where backward gathers weights: a gather must not come between averages whose
        order is fixed, because other ranks may be at another average."""
        gathers = any(unit.is_gathered and unit.is_streamed for unit in self._units)
        if gathers or not self.order or not self._fits_forward():
            return 0, 0
        what = b"".join(number.to_bytes(4, "little") for number in (backward & 0xFFFFFFFF, *self.order))
        found = blake2b(what, digest_size=8).digest()
        return int.from_bytes(found[:4], "little"), int.from_bytes(found[4:], "little")

    def _fits_forward(self) -> bool:
        """Whether the forwards of this backward have used the same blocks. A block that is expected in vain would keep
        the gradients behind it on the GPU until the end."""
        expected = set(self.order)
        return all(
            (unit.order in expected) == (unit.uses.begun > 0 and not unit.trained.is_off and bool(unit.codec.numel))
            for unit in self._units
            if unit.spec.kind == "block"
        )
