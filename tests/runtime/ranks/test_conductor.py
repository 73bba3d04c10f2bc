"""The order that ranks agree on, with threads for the ranks and members that only note what they are asked for."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ds_slide import _native
from ds_slide.errors import SlideError
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.ranks.board import TEXT_BYTES, Board
from ds_slide.runtime.core.ranks.conductor import RING, Conductor, Entry, Kind, _Row


@dataclass
class Backward:
    """A member that has ended when it says so. Rank 0 enters unit 5 at each end."""

    conductor: Conductor
    ended: list[int]
    """The last backward that each rank has ended."""
    engine: int = 1
    backward: int = 1
    seen: list[str] = field(default_factory=list)
    settles: bool = False
    has_order_left: bool = False

    def begin_order(self, entry: Entry) -> None:
        self.seen.append(f"order of {entry.backward}")
        self.has_order_left = True

    def follow_order(self) -> None:
        pass

    def finish_order(self) -> None:
        if self.has_order_left:
            self.seen.append("order finished")
        self.has_order_left = False

    def is_settled(self) -> bool:
        return self.settles

    def lead(self) -> None:
        pass

    def average(self, entry: Entry) -> None:
        self.seen.append(f"unit {entry.unit}")

    def has_ended(self, rank: int) -> bool:
        return self.ended[rank] == self.backward

    def lead_end(self) -> None:
        self.conductor.append(entry := Entry(Kind.UNIT, self.engine, 5))
        self.average(entry)

    def close(self) -> None:
        self.backward += 1
        self.seen.append("closed")

    def joined(self) -> None:
        self.seen.append("joined")

    def end(self) -> None:
        self.finish_order()
        self.ended[self.conductor.board.rank] = self.backward
        self.conductor.end(self, Failures())


def ranks_of(count: int) -> list[Backward]:
    numbers = count * len(_Row) + 1 + RING
    slab = _native.Slab(_native.Generations.bytes(numbers), False, False)
    texts, ended = mmap.mmap(-1, count * TEXT_BYTES), [0] * count
    members = []
    for rank in range(count):
        board = Board(_native.Generations(slab, numbers), texts, rank, count, len(_Row))
        members.append(Backward(Conductor(board), ended))
        members[-1].conductor.enter(members[-1])
    return members


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns, or the SlideError that it raises."""

    def result(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except SlideError as error:
            return str(error)

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=30) for future in [pool.submit(result, call) for call in calls]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_come_to_the_end_and_then_to_a_step(ranks: int) -> None:
    members = ranks_of(ranks)

    def step(member: Backward) -> None:
        member.end()
        member.conductor.meet("a step", Failures())

    for _ in range(3):
        assert together(*(lambda member=each: step(member) for each in members)) == [None] * ranks
    assert all(each.seen == ["unit 5", "closed"] * 3 for each in members)


def test_behind_a_settled_backward_only_a_rank_ahead_of_rank_0_waits() -> None:
    """Each rank alone: a wait for the other one would not end."""
    first, second = ranks_of(2)
    first.settles = True
    for _ in range(3):
        for member in (first, second):
            member.end()
            for what in ("a step", "a sum"):
                member.conductor.meet(what, Failures(), step_of=member.engine)
    assert first.seen == second.seen == ["closed"] * 3


def test_a_step_meets_again_behind_a_backward_that_is_not_settled() -> None:
    first, second = ranks_of(2)
    first.settles = True
    for member in (first, second):
        member.end()
        member.conductor.announce(member)
    first.settles = False

    def step(member: Backward) -> None:
        member.end()
        member.conductor.meet(f"a step of rank {member.conductor.board.rank}", Failures(), step_of=member.engine)

    sentences = together(lambda: step(first), lambda: step(second))
    assert sentences[0] == sentences[1] and "a step of rank 1" in sentences[0]


def test_another_engine_and_what_is_no_step_meet_behind_a_settled_backward() -> None:
    first, second = ranks_of(2)
    first.settles = True
    for member in (first, second):
        member.end()
    for number in (None, 2):
        sentences = together(
            lambda of=number: first.conductor.meet("one place", Failures(), step_of=of),
            lambda of=number: second.conductor.meet("another", Failures(), step_of=of),
        )
        assert sentences[0] == sentences[1] and "another" in sentences[0]


def test_a_rank_that_an_exception_took_out_of_a_settled_backward_goes_on() -> None:
    first, second = ranks_of(2)
    first.settles = True
    first.end()
    second.backward += 1  # abandoned
    first.settles = False
    assert together(first.end, second.end) == [None] * 2
    assert first.backward == second.backward == 3
    assert second.seen == ["unit 5", "closed"]


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_a_rank_without_a_backward_takes_part_in_those_of_others(idle: int) -> None:
    members = ranks_of(3)

    def step(member: Backward) -> None:
        if member is not members[idle]:
            member.end()
        member.conductor.meet("a step", Failures())

    assert together(*(lambda member=each: step(member) for each in members)) == [None] * 3
    for rank, member in enumerate(members):
        assert member.seen == ["unit 5", "closed"] + ["joined"] * (rank == idle)


@pytest.mark.parametrize("stray", [0, 1, 2])
def test_a_rank_at_another_place_is_named_on_all_and_later_meetings_take_place(stray: int) -> None:
    members = ranks_of(3)
    places = ["a gather", "a gather", "a gather"]
    places[stray] = "a step"

    def meet(member: Backward) -> None:
        member.conductor.meet(places[member.conductor.board.rank], Failures())

    sentences = together(*(lambda member=each: meet(member) for each in members))
    assert len(set(sentences)) == 1
    first, second = places[0], "a step" if stray else "a gather"
    assert f"rank 0 to {first}, rank {stray or 1} to {second};" in sentences[0]
    places[:] = ["a gather"] * 3
    assert together(*(lambda member=each: meet(member) for each in members)) == [None] * 3


def test_inside_of_an_entry_nothing_meets() -> None:
    (member, _) = ranks_of(2)
    with member.conductor.entry():
        member.conductor.meet("a sum", Failures())
        member.conductor.look()


def test_what_is_behind_an_order_is_followed_when_the_order_is_finished() -> None:
    first, second = ranks_of(2)
    first.conductor.append(Entry(Kind.ORDER, first.engine, backward=1))
    first.conductor.append(Entry(Kind.UNIT, first.engine, 7))
    second.conductor.look()
    assert second.seen == ["order of 1"]
    assert together(first.end, second.end) == [None] * 2
    assert second.seen == ["order of 1", "order finished", "unit 7", "unit 5", "closed"]


def test_a_rank_outside_of_backward_finishes_an_order_before_it_meets_others() -> None:
    first, second = ranks_of(2)
    first.conductor.append(Entry(Kind.ORDER, first.engine, backward=1))
    second.conductor.look()
    meet = [lambda member=each: member.conductor.meet("a step", Failures()) for each in (first, second)]
    assert together(*meet) == [None] * 2
    assert second.seen == ["order of 1", "order finished"]


def test_no_collective_comes_inside_of_an_order() -> None:
    (member, _) = ranks_of(2)
    member.has_order_left = True
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda _: member.conductor.meet("saving a checkpoint", Failures()))
    with pytest.raises(SlideError, match=r"saving a checkpoint came in the middle of a backward .* call it before"):
        tensor.sum().backward()


def test_a_rank_with_an_order_left_waits_for_no_pace() -> None:
    (_, second) = ranks_of(2)
    for _ in range(3):
        second.conductor.announce(second)
    second.has_order_left = True
    second.conductor.keep_pace(9, Failures())


def test_only_a_rank_that_is_ahead_waits_for_the_pace() -> None:
    first, second = ranks_of(2)
    for _ in range(3):
        second.conductor.announce(second)
    first.conductor.keep_pace(9, Failures())  # behind: it goes on
    second.conductor.keep_pace(1, Failures())  # ahead, with little waiting
    waits = threading.Thread(target=second.conductor.keep_pace, args=(9, Failures()))
    waits.start()
    assert waits.is_alive()
    first.conductor.announce(first)
    waits.join(30)
    assert not waits.is_alive()


def test_a_rank_that_waits_itself_is_not_waited_for() -> None:
    """It may be at the end of a backward of fewer modules."""
    first, second = ranks_of(2)
    for _ in range(3):
        second.conductor.announce(second)
    first.conductor._come_to("the end", Failures())
    second.conductor.keep_pace(9, Failures())
