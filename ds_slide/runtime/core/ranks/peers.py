"""The state of the other ranks of this machine, so that the watchdog can judge a wait for one of them.

Each rank writes to a board in shared memory how long its training has stood still, and whether its engine has ended.
The operating system tells whether a process is alive. Ranks of several machines have no board: they tell each other
over the network (`ds_slide.runtime.core.ranks.distant_peers`).
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

from ds_slide.runtime.core.ranks.board import Board, open_board
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.ranks.sharing import machine_identity

TEXT_BYTES = 1000
"""Bytes of a rank's line of text."""


class _Row(IntEnum):
    """The numbers of each rank on the board."""

    STANDS_MS = 0
    CLOSED = auto()


@dataclass(frozen=True)
class State:
    """The state of one rank. `stands_s`: the seconds since the last progress of its training."""

    stands_s: float = 0.0
    what: str = ""
    """Which thread waits for what there, or why the engine has ended."""
    closed: bool = False
    """Whether its engine has ended."""


@dataclass(frozen=True)
class Peer:
    """Another rank as this rank sees it."""

    rank: int
    process: int
    state: State
    is_gone: bool = False
    """Whether its process has ended."""
    host: str = ""
    """Its host, where ranks are on several."""
    silent_s: float = 0.0
    """Seconds since it was last heard from; 0 on one machine, where the operating system tells of its end."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({f'{self.host}, ' if self.host else ''}process {self.process})"

    @property
    def has_ended(self) -> bool:
        """Whether its engine, or its process, has ended."""
        return self.state.closed or self.is_gone

    def stands(self, limit_s: float) -> bool:
        """Whether it has stood still for `limit_s`. Its number may be two checks of its watchdog old. The number of a
        rank that a debugger has stopped does not grow, so the other ranks wait for it."""
        return self.state.stands_s >= 0.9 * limit_s

    def is_lost(self, silence_s: float) -> bool:
        """Whether it has ended, or has been silent for `silence_s`: its host, or the way there, is down."""
        return self.has_ended or self.silent_s >= silence_s

    def __str__(self) -> str:
        if self.is_gone or self.state.closed:
            return f"{self.name} is gone" if self.is_gone else f"{self.name} has ended its engine"
        return f"{self.name} has not been heard from for {self.silent_s:.0f} s"


class Peers:
    """The other ranks of this machine. The watchdog's thread calls `tell` and `others`, and so does its close."""

    def __init__(self, board: Board, processes: Sequence[int], watched: dict[int, int]) -> None:
        """Read `board`. `processes`: the process numbers by rank. `watched`: a pidfd for each rank whose process can be
        watched."""
        self._board = board
        self._processes = processes
        self._watched = watched

    @classmethod
    def of(cls, ranks: Ranks) -> Peers | None:
        """Return the peers of this rank; None on all ranks where they share no memory. Collective."""
        board = open_board(ranks, len(_Row), text_bytes=TEXT_BYTES)
        if board is None:
            return None
        processes = ranks.exchange((os.getpid(), _process_space()), "telling the numbers of processes")
        own = processes[ranks.rank][1]
        watched = {}
        for rank in board.others:
            number, space = processes[rank]
            if own and space == own:
                try:
                    watched[rank] = os.pidfd_open(number)
                except OSError:  # a kernel before 5.3, or a process that has ended: the launcher notices that
                    continue
        return cls(board, [number for number, _ in processes], watched)

    def tell(self, state: State) -> None:
        """Tell the other ranks the state of this one."""
        self._board.write_text(state.what)
        self._board.put(_Row.CLOSED, state.closed)
        self._board.publish(_Row.STANDS_MS, round(1000 * state.stands_s))

    def others(self) -> list[Peer]:
        """Return the other ranks with the states that they told last."""
        return [
            Peer(rank, self._processes[rank], self._state(rank), self._is_gone(rank)) for rank in self._board.others
        ]

    def close(self) -> None:
        for descriptor in self._watched.values():
            os.close(descriptor)
        self._watched = {}

    def _state(self, rank: int) -> State:
        stands_ms = self._board.get(rank, _Row.STANDS_MS)
        return State(stands_ms / 1000, self._board.text(rank), bool(self._board.get(rank, _Row.CLOSED)))

    def _is_gone(self, rank: int) -> bool:
        if rank not in self._watched:
            return False
        poll = select.poll()
        poll.register(self._watched[rank], select.POLLIN)
        return bool(poll.poll(0))


def _process_space() -> str:
    """Return a string that is equal for processes that see each other's numbers; empty where that cannot be known."""
    try:
        return machine_identity("pid")
    except OSError:
        return ""
