"""One order of collectives for ranks that run different modules: rank 0 writes it into a log, the others follow it.

Two kinds of collectives meet here.

* Averages of gradients. Each rank announces a unit when its backward has left the unit's gradient
  (`ds_slide.runtime.gradients.agreement`). Rank 0 enters a unit into the log, and issues its average, when it sees that
  all ranks have announced it; the others issue what the log says. All ranks check the log at each of their hooks in
  backward, and no rank waits. Rank 0 enters the remaining units at the end of backward, where all ranks wait. Ranks
  that run the same modules expect the same units in the same order as in the backward before. When rank 0 sees that all
  expect the same, it enters that order. From then on each rank issues its averages in this order at its own hooks,
  without checking the others. At its end it issues zeros for missing gradients.
* All others come in the order of the program (gathers, sums, exchanges). Each is a meeting: a rank publishes which
  meeting it has come to, and waits until rank 0 has seen all ranks at the same meeting. So ranks at different meetings
  all raise the same error before anything is issued. A rank outside of a backward, when others have come to the end of
  theirs, takes part in that end, with zeros.

The host runs ahead of its GPU, and a wait for another rank's host takes some of that lead. So with clipping off a
backward can be settled: it is the only backward before its step, and every unit has been averaged. Rank 0 then does not
wait at the end, and the step has no meetings. One of three waits in a step remains, for ranks ahead of rank 0. In every
step, the gathers behind the sum of its norm are one place of the program (`Ranks.in_one_place`): they have no meetings.

There is no circular wait, for these reasons. Take the first entry of the log (a unit, an end, a meeting) that some rank
never completes, and the ranks that have not come to it.

* A unit: rank 0 entered it when all ranks had announced it or waited at the end. Rank 0 issues it at once. Another rank
  comes to its next hook, or waits: in every wait of this module it issues what the log says. Between hooks it waits for
  its lanes. Their jobs depend only on collectives before this entry, and these are complete. It does not wait for new
  weights of another rank, whose lanes may stand still while a GPU spins in this entry: it has announced, so its forward
  is over, and backward binds only versions that the forward has bound.
* An order: rank 0 entered it when all ranks were in this backward. A rank then issues a unit of the order at a hook, at
  its end, or when it leaves the backward. Until then it waits only for its lanes, as above. The entries after an order
  are followed when all of its units are issued. A backward with gathers has no order. With a second engine there is
  none either, because its averages could have to come between.
* An end or a meeting: rank 0 waits for the others, and has issued nothing that they have not. Each of them comes to a
  meeting or an end itself, because all entries before are complete; it stays there until rank 0 has made the entry. If
  all have come to the same kind, rank 0 makes the entry. Otherwise rank 0 takes part, or all raise.
* A settled end: rank 0 makes the entry when all units are averaged and it has come to the end itself. The next step
  issues its sum, and gathers the weights that it updates on the GPU, without a meeting. Every rank comes to these, in
  the same order: before them, a rank waits for this entry alone, and rank 0 for nothing. A GPU that spins in such a
  collective delays only the next step of its own rank. No rank waits for another rank's next step before it has issued
  these collectives itself.
* The gathers of a step: all ranks have come to the sum before them, in a meeting or behind a settled end. All of them
  apply the step or none does, since the sum is the same. Until a rank has issued all gathers, it waits only for its
  lanes, as above.
* The wait of a rank that is ahead in its backward (`Conductor.keep_pace`): a rank waits only for a rank that is behind.
  Each rank counts its announcements, and its count is highest while it is at an end or a meeting. So these waits follow
  an order, and the last rank never waits.

Work that a rank does for an entry (packing, sums for learning projectors) is part of the entry: it has no meetings of
its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from ds_slide.errors import SlideError
from ds_slide.runtime.core.calls import in_backward
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.ranks.board import MASK, Board, open_board
from ds_slide.runtime.core.ranks.collectives import Ranks

TAG = 15
"""The mask for a backward's number in an entry."""
_ENGINES = 255
"""The mask for an engine's number in an entry."""
RING = 1 << 15
"""Entries that the log keeps. A rank is behind by the entries of one backward at most: it follows the log before it
announces or ends."""
AT_REST = 1023
"""The count of announcements of a rank that waits for the others."""
PACE = 2
"""The most announcements by which a rank may be ahead, while the gradients of at least this number of units wait on its
GPU."""


class _Row(IntEnum):
    """Numbers in the row of a rank."""

    MEETINGS = 0
    PLACE = 1
    """A digest of the place in the program that it has come to; the text names it."""
    IS_OUTSIDE = 2
    """Whether the rank came there outside of a backward."""
    PACE = 3


class Kind(IntEnum):
    UNIT = 0
    END = 1
    MEETING = 2
    APART = 3
    """The ranks have come to different places; `unit` is a rank in another place than rank 0."""
    ORDER = 4
    """All ranks expect the same units, in the same order."""


@dataclass(frozen=True)
class Entry:
    """An entry of the log, of 32 bits. `engine` and `backward` are the last bits of their numbers."""

    kind: Kind
    engine: int = 0
    unit: int = 0
    backward: int = 0
    final: bool = False

    def packed(self) -> int:
        place = _place_of(self.engine) << 16 | self.unit
        return self.kind << 29 | self.final << 28 | (self.backward & TAG) << 24 | place

    @classmethod
    def of(cls, word: int) -> Entry:
        return cls(Kind(word >> 29), word >> 16 & _ENGINES, word & 0xFFFF, word >> 24 & TAG, bool(word >> 28 & 1))


def _place_of(engine: int) -> int:
    """Return the bits of an engine's number that the log and the table of members use."""
    return engine & _ENGINES


class Member(Protocol):
    """The part of an engine that works for the log (`ds_slide.runtime.gradients.agreement.Agreement`)."""

    engine: int
    backward: int
    """The number of the open backward, or of the next one."""

    def is_settled(self) -> bool:
        """Whether this rank has announced and averaged all units, in the last backward before the step."""

    @property
    def has_order_left(self) -> bool:
        """Whether units of an order are left to average here."""

    def begin_order(self, entry: Entry) -> None:
        """Average, from now on, the units that all ranks expect, in their order."""

    def follow_order(self) -> None:
        """Average the next units of the order, as far as this rank has announced them."""

    def finish_order(self) -> None:
        """Average the remaining units of the order, with zeros where this rank has no gradient."""

    def lead(self) -> None:
        """Enter and average the units that all ranks have announced, or the order that all expect. On rank 0."""

    def average(self, entry: Entry) -> None:
        """Take part in an entry for a unit."""

    def has_ended(self, rank: int) -> bool:
        """Whether the other rank waits at the end of the backward that is open here."""

    def lead_end(self) -> None:
        """Enter and average the remaining units of the backward, where all ranks have come to its end. On rank 0."""

    def close(self) -> None:
        """Close the backward, which has ended on all ranks."""

    def joined(self) -> None:
        """Note that the backward has ended, and that this rank took part in the end alone."""


class Conductor:
    """The log, as one rank sees it, for all engines of a process. Called by the thread that computes."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.announced = 0
        """Gradients that this rank has announced so far."""
        self._members: dict[int, Member] = {}
        self._place = 0
        """Entries of the log that this rank has written or followed."""
        self._meetings = 0
        self._ends = 0
        self._count = 0
        """Announcements in the open backward."""
        self._is_in_entry = False
        self._settled: set[int] = set()
        """Engines whose last backward ended settled: their next step has no meetings."""

    @classmethod
    def of(cls, ranks: Ranks) -> Conductor | None:
        """Return the conductor of these ranks, made for their first engine; None where they have no board, or share
        sequences. Collective."""
        if ranks.world_size == 1:
            return None
        if ranks.divides_sequences:
            cls._leave_order_to_program(ranks)
        if not ranks.has_asked_for_conductor:
            board = open_board(ranks, len(_Row), 1 + RING)
            ranks.conduct(None if board is None else cls(board))
        conductor = ranks.conductor
        assert conductor is None or isinstance(conductor, cls)
        return conductor

    @classmethod
    def _leave_order_to_program(cls, ranks: Ranks) -> None:
        """Have no conductor: blocks have collectives of their own, at which a rank may stand while another is in an
        average that it was the first to enter."""
        earlier = ranks.conductor
        if isinstance(earlier, cls) and earlier._members:
            raise SlideError(
                "an engine with sequence parallelism cannot train beside one without, which was built before and "
                "averages gradients in another order; destroy that engine first, or build it second"
            )
        ranks.conduct(None)

    def enter(self, member: Member) -> None:
        self._members[_place_of(member.engine)] = member

    def leave(self, member: Member) -> None:
        self._members.pop(_place_of(member.engine), None)
        self._settled.discard(_place_of(member.engine))

    @property
    def leads(self) -> bool:
        return self.board.rank == 0

    @property
    def has_one_engine(self) -> bool:
        """Whether this process averages the gradients of one engine alone."""
        return len(self._members) == 1

    @property
    def _has_order_left(self) -> bool:
        return any(member.has_order_left for member in self._members.values())

    # ---- under backward ----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Issue the averages that all ranks have announced, as far as this rank knows. This never waits."""
        if self._is_in_entry:
            return
        for member in self._members.values():
            member.follow_order()
        if self.leads:
            for member in self._members.values():
                member.lead()
        else:
            self._follow()

    def announce(self, member: Member) -> None:
        """Count a gradient that this rank has announced with `Board.put`."""
        self._settled.discard(_place_of(member.engine))
        self.announced += 1
        self._count += 1
        self._tell_pace(min(self._count, AT_REST - 1))

    def keep_pace(self, waiting: int, failures: Failures) -> None:
        """Wait for ranks that are behind, if gradients of `PACE` units or more wait here: only GPU memory would limit
        their number otherwise. `waiting`: the number of these units."""
        own = self._pace(self._count)
        if waiting < PACE or self._is_in_entry or self._has_order_left or not self._is_ahead(own):
            return
        before = self._place

        def others_have_come() -> bool:
            self.look()
            return self._place != before or not self._is_ahead(own)

        self.board.until(others_have_come, failures, "the other ranks in backward, which are behind")

    def _is_ahead(self, own: int) -> bool:
        for rank in self.board.others:
            behind = own - self.board.get(rank, _Row.PACE) & MASK
            if PACE < behind < 1 << 31:
                return True
        return False

    def _pace(self, count: int) -> int:
        return (self._ends << 10) + min(count, AT_REST) & MASK

    def _tell_pace(self, count: int) -> None:
        self.board.publish(_Row.PACE, self._pace(count))

    # ---- the log -----------------------------------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        """On rank 0."""
        self.board.put_more(1 + self._place % RING, entry.packed())
        self._place = self._place + 1 & MASK
        self.board.publish_more(0, self._place)

    @contextmanager
    def entry(self) -> Iterator[None]:
        """Mark the work inside the context as work for an entry."""
        self._is_in_entry = True
        try:
            yield
        finally:
            self._is_in_entry = False

    def _follow(self) -> Entry | None:
        """Take part in the next averages of the log. Returns the entry after them, if it is of another kind."""
        while self._place != self.board.get_more(0) and not self._has_order_left:
            entry = Entry.of(self.board.get_more(1 + self._place % RING))
            if entry.kind is Kind.UNIT:
                self._pass()
                self._members[entry.engine].average(entry)
            elif entry.kind is Kind.ORDER:
                self._pass()
                self._members[entry.engine].begin_order(entry)
            elif entry.kind is Kind.END and self._has_left(entry):
                self._pass()
            else:
                return entry
        return None

    def _has_left(self, entry: Entry) -> bool:
        """Whether `entry` is the settled end of a backward that an exception has ended on this rank."""
        member = self._members.get(entry.engine)
        return entry.final and member is not None and 0 < (member.backward - entry.backward & TAG) <= TAG // 2

    def _pass(self) -> None:
        self._place = self._place + 1 & MASK

    # ---- ends and meetings -------------------------------------------------------------------------------------------

    def end(self, member: Member, failures: Failures) -> None:
        """Wait until the backward of this member has ended on all ranks, or is settled, and all of its gradients are
        averaged. The member has published on its own board that it has ended here."""
        what = f"the end of backward number {member.backward} (engine {member.engine})"
        self._come_to(what, failures)
        if self.leads:
            self._lead_end(member, what, failures)
        else:
            self.board.until(lambda: self._is_over(member, failures), failures, f"the other ranks in {what}")

    def _is_over(self, member: Member, failures: Failures) -> bool:
        entry = self._follow()
        if entry is None:
            return False
        if entry.kind is Kind.APART:
            self._raise(entry.unit, failures)
        assert entry.kind is Kind.END and entry.engine == _place_of(member.engine), entry
        self._pass()
        self._close(member, settled=entry.final)
        return True

    def _lead_end(self, member: Member, what: str, failures: Failures) -> None:
        def nothing_is_left() -> bool:
            self.look()
            return member.is_settled() or all(self._takes_part(member, rank, failures) for rank in self.board.others)

        self.board.until(nothing_is_left, failures, f"the other ranks in {what}")
        settled = member.is_settled()
        if not settled:
            member.lead_end()
        self.append(Entry(Kind.END, member.engine, backward=member.backward, final=settled))
        self._close(member, settled=settled)

    def _takes_part(self, member: Member, rank: int, failures: Failures) -> bool:
        """Whether a rank has come to the end of this backward, or to a meeting outside of any backward."""
        if member.has_ended(rank):
            return True
        if not self._is_at_later_meeting(rank):
            return False
        if not self.board.get(rank, _Row.IS_OUTSIDE):
            self._part(rank, failures)
        return True

    def _is_at_later_meeting(self, rank: int) -> bool:
        return self.board.get(rank, _Row.MEETINGS) != self._meetings

    def _close(self, member: Member, *, settled: bool = False) -> None:
        if settled:
            self._settled.add(_place_of(member.engine))
        self._ends += 1
        self._count = 0
        self._tell_pace(0)
        member.close()

    def meet(self, what: str, failures: Failures, *, step_of: int | None = None) -> None:
        """Wait until all ranks have come to this place of the program. Raises SlideError on all ranks if they have come
        to different places. Inside of an entry this does nothing: the entry is the place. `step_of`: the engine whose
        step this is in; a step after a settled backward has no meetings."""
        if self._is_in_entry or (step_of is not None and _place_of(step_of) in self._settled):
            return
        is_outside = not in_backward()
        self._leave_order(what, is_outside=is_outside)
        self.board.put(_Row.IS_OUTSIDE, is_outside)
        meeting = self._meetings + 1 & MASK
        self._come_to(what, failures, meeting)
        if self.leads:
            self._lead_meeting(meeting, what, failures, is_outside=is_outside)
        else:
            self.board.until(lambda: self._is_met(failures), failures, f"the other ranks in {what}")
        self._meetings = meeting
        self._tell_pace(self._count)

    def _leave_order(self, what: str, *, is_outside: bool) -> None:
        """Average the rest of an order after an exception has ended its backward here: the GPUs of other ranks may wait
        for it. Raises SlideError inside of such a backward."""
        if self._has_order_left and not is_outside:
            raise SlideError(
                f"{what} came in the middle of a backward whose gradients the ranks average in an order that they have "
                "agreed on; call it before or after backward()"
            )
        for member in self._members.values():
            member.finish_order()

    def _lead_meeting(self, meeting: int, what: str, failures: Failures, *, is_outside: bool) -> None:
        def all_have_come() -> bool:
            self.look()
            for rank in self.board.others:
                for member in tuple(self._members.values()):
                    if member.has_ended(rank):
                        if not is_outside:
                            self._part(rank, failures)
                        self._lead_end(member, what, failures)
                        member.joined()
                        self._tell_pace(AT_REST)
                if self.board.get(rank, _Row.MEETINGS) != meeting:
                    return False
            return True

        self.board.until(all_have_come, failures, f"the other ranks in {what}")
        for rank in self.board.others:
            if self.board.get(rank, _Row.PLACE) != self.board.get(0, _Row.PLACE):
                self._part(rank, failures)
        self.append(Entry(Kind.MEETING))

    def _is_met(self, failures: Failures) -> bool:
        while (entry := self._follow()) is not None:
            if entry.kind is Kind.APART:
                self._raise(entry.unit, failures)
            self._pass()
            if entry.kind is Kind.MEETING:
                return True
            member = self._members[entry.engine]
            self._close(member)
            member.joined()
            self._tell_pace(AT_REST)
        return False

    def _come_to(self, what: str, failures: Failures, meeting: int | None = None) -> None:
        failures.raise_first()
        self.board.write_text(what)
        self.board.put(_Row.PLACE, zlib.crc32(what.encode()))
        if meeting is not None:
            self.board.put(_Row.MEETINGS, meeting)
        self._tell_pace(AT_REST)

    # ---- different places --------------------------------------------------------------------------------------------

    def _part(self, rank: int, failures: Failures) -> None:
        self.append(Entry(Kind.APART, unit=rank))
        self._raise(rank, failures)

    def _raise(self, rank: int, failures: Failures) -> None:
        error = SlideError(
            f"the ranks have come to different places of the program: rank 0 to {self.board.text(0)}, rank {rank} to "
            f"{self.board.text(rank)}; weights that are gathered (on several machines, on SSD, or with "
            "ds_slide.share_weights false) need all ranks to run the same blocks in the same order, and saving and "
            "reading states need all ranks at any time; resume from the last checkpoint"
        )
        if not self.leads:
            self._pass()
        # Later engines count the meeting as done.
        self._meetings = self._meetings + 1 & MASK
        self.board.put(_Row.MEETINGS, self._meetings)
        failures.end(str(error))
        raise error
