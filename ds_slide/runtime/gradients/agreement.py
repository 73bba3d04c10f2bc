"""Which units have gradients in a backward, agreed by ranks that may run different modules.

A rank announces a unit when the unit's gradient is complete there, and keeps the gradient until the log of rank 0
(`ds_slide.runtime.ranks.conductor`) says that it is averaged: at once where all ranks announce it, at the end of
backward where some do not. These contribute zeros, so that the average is the one that DDP finds with
`find_unused_parameters`. A unit that no rank has a gradient of is treated as with one rank, alike on all of them.

A gradient that waits lies in a staging buffer if one is free, and otherwise where autograd left it. One buffer stays
free for units that are averaged meanwhile. A unit that is used again after its announcement announces again: its
contributions are averaged one by one, and a rank that has fewer contributes zeros.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_slide.runtime.gradients.sources import Staging
from ds_slide.runtime.ranks.board import Board
from ds_slide.runtime.ranks.conductor import TAG, Conductor, Entry, Kind
from ds_slide.runtime.transfers.handoff import Failures
from ds_slide.runtime.unit import Unit


@dataclass(frozen=True)
class Contribution:
    """The gradients of a unit, as autograd left them or packed."""

    gradients: list[torch.Tensor | None]
    packed: Staging | None = None


MOST = 255
"""Contributions of a unit to one backward. What comes after the last but one is added up, and is the last."""
_ENDED, _FIRST_UNIT = 0, 1


class Engine(Protocol):
    """The engine whose gradients these are (`ds_slide.runtime.engine.SlideRuntime`)."""

    def contribution(self, unit: Unit) -> Contribution:
        """Take the gradients out of the unit's parameters."""

    def drop_contribution(self, contribution: Contribution) -> None:
        """It is not averaged."""

    def take_agreed(self, unit: Unit, *, final: bool) -> None:
        """Average what `Unit.gradients` gives, and send it on its way."""

    def forget_agreed(self, unit: Unit) -> None:
        """What was just averaged belongs to gradients that this rank has dropped."""

    def counts_as_zero(self, unit: Unit) -> bool:
        """Whether a unit that no rank has a gradient of is updated as if that was zero."""

    def is_final(self) -> bool:
        """Whether the backward under way is the last one before the step."""

    def is_only(self) -> bool:
        """Whether none may come before the step beside the backward under way."""

    def end_joined_backward(self) -> None:
        """A backward has ended in which this rank had no gradient."""


class Agreement:
    """What one rank of an engine has announced. `number`: of the engine. Called by the thread that computes."""

    def __init__(
        self,
        conductor: Conductor,
        board: Board,
        number: int,
        units: Sequence[Unit],
        engine: Engine,
        failures: Failures,
    ) -> None:
        self.engine = number
        self._conductor = conductor
        self._board = board
        self._units = units
        self._of = engine
        self._failures = failures
        self.backward = 1
        self._announced = [0] * len(units)
        self._averaged = [0] * len(units)
        """Contributions to this backward, by `Unit.order`."""
        self._waiting: dict[int, deque[Contribution]] = {}
        """Contributions that are not averaged yet."""
        conductor.enter(self)

    @staticmethod
    def width(num_units: int) -> int:
        """Numbers of a row of the board."""
        return _FIRST_UNIT + num_units

    @property
    def is_open(self) -> bool:
        """Whether this rank has announced anything in the backward that has not ended."""
        return any(self._announced)

    # ---- under backward ----------------------------------------------------------------------------------------------

    def announce(self, unit: Unit, *, at_end: bool = False) -> None:
        """Take the gradients out of the unit's parameters, to be averaged when all ranks have them. `at_end`: of
        backward, when nothing more comes."""
        count = self._announced[unit.order] + 1
        if count >= MOST and not at_end:
            return
        self._waiting.setdefault(unit.order, deque()).append(self._of.contribution(unit))
        self._announced[unit.order] = count
        unit.is_postponed = True
        self._board.put(_FIRST_UNIT + unit.order, self._cell(count))
        self._conductor.announce(self)

    def look(self) -> None:
        """Average what can be, and let ranks that are behind catch up where much is waiting."""
        self._conductor.look()
        self._conductor.keep_pace(len(self._waiting), self._failures)

    def end(self) -> None:
        """All that this rank has is announced. Average what is left on any rank, with all ranks."""
        self._board.put(_ENDED, self.backward)
        self._conductor.end(self, self._failures)

    def abandon(self) -> None:
        """Drop what is announced in a backward that has not ended. What rank 0 enters all the same, before it comes to
        this place of the program, is averaged and dropped."""
        if self.is_open:
            self.close()

    def leave(self) -> None:
        self._conductor.leave(self)

    def _cell(self, count: int) -> int:
        return self.backward << 8 | count

    def _count(self, rank: int, order: int) -> int:
        cell = self._board.get(rank, _FIRST_UNIT + order)
        return cell & 255 if cell >> 8 == self.backward & 0xFFFFFF else 0

    # ---- what the log makes of it ------------------------------------------------------------------------------------

    def lead(self) -> None:
        """Enter and average the units that all ranks have announced. On rank 0."""
        others = self._board.others
        for order in tuple(self._waiting):
            while self._averaged[order] < self._announced[order] and all(
                self._count(rank, order) > self._averaged[order] for rank in others
            ):
                self._enter(order)

    def lead_end(self) -> None:
        """Enter and average all that is left, in the order of the units. On rank 0."""
        ranks = [0, *self._board.others]
        for unit in self._units:
            most = max(self._count(rank, unit.order) for rank in ranks)
            if not most and self._of.counts_as_zero(unit):
                most = 1
            while self._averaged[unit.order] < most:
                self._enter(unit.order)

    def _enter(self, order: int) -> None:
        entry = Entry(Kind.UNIT, self.engine, order, self.backward & TAG, self._of.is_final())
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
        unit.taken, unit.packed = contribution.gradients, contribution.packed
        if waiting is not None and not waiting:
            del self._waiting[unit.order]
            unit.is_postponed = False
        try:
            with self._conductor.entry():
                self._of.take_agreed(unit, final=entry.final)
        finally:
            unit.taken = unit.packed = None
        if is_dropped:
            self._of.forget_agreed(unit)

    def is_settled(self) -> bool:
        """Whether this rank has announced and averaged all units, in a backward that none follows before the step."""
        if not self.is_open or self._waiting or not self._of.is_only():
            return False
        return not any(self._of.counts_as_zero(unit) for unit in self._units)

    def has_ended(self, rank: int) -> bool:
        """Whether that rank waits at the end of the backward that is open here."""
        return self._board.get(rank, _ENDED) == self.backward & 0xFFFFFFFF

    def close(self) -> None:
        """The backward has ended, on all ranks."""
        for order, contributions in self._waiting.items():
            self._units[order].is_postponed = False
            for contribution in contributions:
                self._of.drop_contribution(contribution)
        self._waiting.clear()
        self._announced = [0] * len(self._units)
        self._averaged = [0] * len(self._units)
        self.backward += 1

    def joined(self) -> None:
        """It has, and this rank took part in the end alone."""
        self._of.end_joined_backward()
