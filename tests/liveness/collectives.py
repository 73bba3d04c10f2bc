"""Collectives between the ranks of one process: matched call by call within a group, and refused where they differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as real_dist

from liveness.scheduler import Operation, active


class Mismatch(AssertionError):
    """Two ranks have issued different collectives at one place of a group's order."""


@dataclass
class Meeting:
    """One collective of a group. It takes place when every rank has come, and is over for all at once."""

    what: tuple[Any, ...]
    calls: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    over: bool = False


class Group:
    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.meetings: dict[int, Meeting] = {}
        self.issued = dict.fromkeys(range(size), 0)

    def describe(self) -> str:
        waiting = [
            f"{meeting.what[0]} number {number} has rank {sorted(meeting.calls)}"
            for number, meeting in self.meetings.items()
            if not meeting.over
        ]
        return f"group {self.name} ({'; '.join(waiting)})"


class Work:
    def __init__(self, group: Group, meeting: Meeting) -> None:
        self._group, self._meeting = group, meeting

    def wait(self, *_args: Any) -> bool:
        scheduler = active()
        if scheduler is not None and not self._meeting.over:
            scheduler.do(Operation("the other ranks", self._group, lambda: self._meeting.over))
        return True

    def is_completed(self) -> bool:
        return self._meeting.over


class Collectives:
    """In place of `torch.distributed`. `one_at_a_time`: as on a GPU whose collectives of all groups share one queue in
    the order of their issue, so that one waits until those issued before it on its rank are over."""

    ReduceOp = real_dist.ReduceOp

    def __init__(self, world_size: int, *, one_at_a_time: bool = False) -> None:
        self.world_size = world_size
        self.world = Group("world", world_size)
        self.one_at_a_time = one_at_a_time
        self._made: dict[int, int] = {}
        self._groups: dict[int, Group] = {}
        self._queues: dict[int, list[Meeting]] = {rank: [] for rank in range(world_size)}

    def __getattr__(self, name: str) -> Any:
        return getattr(real_dist, name)

    @staticmethod
    def _rank() -> int:
        scheduler = active()
        assert scheduler is not None and scheduler.current is not None
        return scheduler.current.rank

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self, group: Any = None) -> int:  # noqa: ARG002
        return self.world_size

    def get_rank(self, group: Any = None) -> int:  # noqa: ARG002
        return self._rank()

    def get_process_group_ranks(self, group: Any) -> list[int]:  # noqa: ARG002
        return list(range(self.world_size))

    def new_group(self, *_args: Any, **_kwargs: Any) -> Group:
        rank = self._rank()
        number = self._made[rank] = self._made.get(rank, -1) + 1
        return self._groups.setdefault(number, Group(str(number), self.world_size))

    def all_gather_into_tensor(
        self, output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Work | None:
        return self._issue(("all_gather", input.numel()), output, input, group, async_op)

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Work | None:
        return self._issue(("reduce_scatter", output.numel(), str(op)), output, input, group, async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Work | None:
        return self._issue(("all_reduce", tensor.numel(), str(op)), tensor, tensor, group, async_op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, group: Any = None, async_op: bool = False) -> Work | None:
        return self._issue(("broadcast", tensor.numel(), src), tensor, tensor, group, async_op)

    def barrier(self, group: Any = None, async_op: bool = False, **_others: Any) -> Work | None:
        return self._issue(("barrier",), torch.zeros(1), torch.zeros(1), group, async_op)

    def all_gather_object(self, given: list[Any], own: Any, group: Any = None) -> None:
        meeting = self._meet(("all_gather_object",), (given, own), group)
        Work(group or self.world, meeting).wait()

    def _issue(
        self, what: tuple[Any, ...], output: torch.Tensor, input: torch.Tensor, group: Any, async_op: bool
    ) -> Work | None:
        work = Work(group or self.world, self._meet(what, (output, input), group))
        if async_op:
            return work
        work.wait()
        return None

    def _meet(self, what: tuple[Any, ...], call: tuple[Any, Any], group: Any) -> Meeting:
        """The meeting to which this rank has come now."""
        group, rank, scheduler = group or self.world, self._rank(), active()
        assert scheduler is not None
        scheduler.do(Operation(f"issue {what[0]}", group))
        number = group.issued[rank]
        group.issued[rank] += 1
        meeting = group.meetings.setdefault(number, Meeting(what))
        if meeting.what != what:
            raise Mismatch(f"group {group.name}, collective {number}: {meeting.what} and, on rank {rank}, {what}")
        meeting.calls[rank] = call
        self._queues[rank].append(meeting)
        self._hold_meetings()
        return meeting

    def _hold_meetings(self) -> None:
        """All that can take place now."""
        again = True
        while again:
            again = False
            for queue in self._queues.values():
                for meeting in queue[:1] if self.one_at_a_time else list(queue):
                    if self._may_begin(meeting):
                        _compute(meeting, self.world_size)
                        meeting.over = again = True
                        for other in self._queues.values():
                            other[:] = [one for one in other if one is not meeting]

    def _may_begin(self, meeting: Meeting) -> bool:
        if meeting.over or len(meeting.calls) < self.world_size:
            return False
        return not self.one_at_a_time or all(queue[0] is meeting for queue in self._queues.values())


def _compute(meeting: Meeting, size: int) -> None:
    what = meeting.what[0]
    if what == "all_gather_object":
        for given, _ in meeting.calls.values():
            given[:] = [meeting.calls[rank][1] for rank in range(size)]
        return
    outputs = [meeting.calls[rank][0] for rank in range(size)]
    inputs = [meeting.calls[rank][1].clone() for rank in range(size)]
    if what == "all_gather":
        for output in outputs:
            output.copy_(torch.cat([each.reshape(-1) for each in inputs]))
    elif what == "reduce_scatter":
        total = torch.stack(inputs).sum(0)
        for output, part in zip(outputs, total.chunk(size), strict=True):
            output.copy_(part)
    elif what == "all_reduce":
        least = "MIN" in meeting.what[2]
        total = torch.stack(inputs).amin(0) if least else torch.stack(inputs).sum(0)
        for output in outputs:
            output.copy_(total)
    elif what == "broadcast":
        for output in outputs:
            output.copy_(inputs[meeting.what[2]])
