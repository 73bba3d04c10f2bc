"""What the ranks tell each other about how they are, so that a wait for another rank can be judged.

Through a key-value store of torch.distributed that only the watchdogs use: its calls come from their threads, and wait
for nothing that a rank does. Whether a process of the same machine is alive is asked of the operating system.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

ANSWER_S = 10.0
"""For an answer of the store; a later one counts as none."""


@dataclass(frozen=True)
class State:
    """Of one rank. `stands_s`: seconds for which its training has stood still, and nothing has come forward."""

    stands_s: float = 0.0
    what: str = ""
    """Who waits for what there."""
    closed: bool = False
    """Its engine has ended."""


@dataclass(frozen=True)
class Process:
    """One rank's process. `started`: clock ticks of its machine at its start, because numbers are used again."""

    host: str
    number: int
    started: str

    @classmethod
    def own(cls) -> Process:
        number = os.getpid()
        return cls(_machine(), number, (_status(number) or ("", ""))[1])

    @property
    def is_near(self) -> bool:
        """Whether it runs on this machine, where the operating system knows of it."""
        return self.host == _machine()

    def is_gone(self) -> bool:
        """Of a process of this machine."""
        status = _status(self.number)
        return status is None or status[0] in "ZX" or status[1] != self.started

    def is_stopped(self) -> bool:
        """Of a process of this machine: whether a debugger, or a signal, holds it."""
        status = _status(self.number)
        return status is not None and status[0] in "tT"


@dataclass(frozen=True)
class Peer:
    """Another rank as it is seen from here."""

    rank: int
    process: Process
    state: State
    silent_s: float
    """Seconds since it last told anything new."""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"rank {self.rank} (process {self.process.number} on {self.process.host})")

    @property
    def has_ended(self) -> bool:
        """Its engine, or its process."""
        return self.state.closed or (self.process.is_near and self.process.is_gone())

    def stands(self, limit_s: float) -> bool:
        """Whether it waits, too, and nothing has come forward there for as long. A rank that is a look behind counts,
        and one that has not been heard of, unless a debugger holds it."""
        if self.process.is_near and self.process.is_stopped():
            return False
        return self.state.stands_s >= 0.5 * limit_s or self.silent_s >= limit_s

    def __str__(self) -> str:
        if self.process.is_near and self.process.is_gone():
            return f"{self.name} is gone"
        return f"{self.name} has ended its engine"


class Peers:
    """Made by all ranks together. `tell` and `others` are called by the watchdog's thread, and at its close."""

    _engines = itertools.count()
    _store: Any = None
    """Of this process, for all its engines: rank 0's process serves it as long as it lives."""

    def __init__(self, rank: int, members: Any) -> None:
        """`members`: the process group of the ranks."""
        processes: list[Any] = [None] * dist.get_world_size(members)
        dist.all_gather_object(processes, asdict(Process.own()), group=members)
        self._rank = rank
        self._processes = [Process(**process) for process in processes]
        store = Peers._store = Peers._store or _open_store(rank, self._processes, members)
        number = next(Peers._engines)
        self._keys = [f"ds_slide/{number}/{other}" for other in range(len(processes))]
        self._told: Any = store
        self._turn = itertools.count()
        others = [other for other in range(len(processes)) if other != rank]
        self._heard: dict[int, tuple[int, float]] = dict.fromkeys(others, (-1, time.monotonic()))
        """By rank: the number of its last news, and when they came."""
        self._known = dict.fromkeys(others, State())
        self.tell(State())
        dist.barrier(members)  # from here on every key is there

    def tell(self, state: State) -> None:
        """Let the others know."""
        try:
            self._told.set(self._keys[self._rank], json.dumps([next(self._turn), asdict(state)]))
        except (RuntimeError, OSError):
            return  # who serves the store is gone; the others see that for themselves

    def others(self) -> list[Peer]:
        """The other ranks, as they have told last."""
        return [self._other(rank) for rank in self._known]

    def _other(self, rank: int) -> Peer:
        try:
            turn, state = json.loads(self._told.get(self._keys[rank]))
            if turn != self._heard[rank][0]:
                self._heard[rank] = (turn, time.monotonic())
                self._known[rank] = State(**state)
        except (RuntimeError, OSError):
            pass  # nobody serves the store any more: the last that is known, and silence
        silent_s = time.monotonic() - self._heard[rank][1]
        return Peer(rank, self._processes[rank], self._known[rank], silent_s)


def _open_store(rank: int, processes: list[Process], members: Any) -> Any:
    """A store of its own: a call of the group's store may wait for ranks that are behind, and hold up all others."""
    timeout = timedelta(seconds=ANSWER_S)
    address = "127.0.0.1"
    if any(not process.is_near for process in processes):
        address = os.environ.get("MASTER_ADDR", processes[0].host)
    served = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout) if rank == 0 else None
    where: list[Any] = [None if served is None else (address, served.port)]
    source = 0 if members is None else dist.get_global_rank(members, 0)
    dist.broadcast_object_list(where, src=source, group=members)
    if served is not None:
        return served
    host, port = where[0]
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _machine() -> str:
    return socket.gethostname()


def _status(number: int) -> tuple[str, str] | None:
    """(state, start) of a process of this machine, None when there is none."""
    try:
        with open(f"/proc/{number}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0].decode(), fields[19].decode()
