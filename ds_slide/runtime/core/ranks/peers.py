"""What the ranks tell each other about how they are, so that a wait for another rank can be judged.

By datagrams from rank to rank: nobody serves the others, sending and hearing never block, and one that is lost is
followed by the next. A connection would stand still together with the rank at its other end. Whether a process of this
machine is alive is asked of the operating system.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ds_slide.runtime.core.ranks import machine

HEAR_S = 10.0
"""Seconds for the first word of every other rank."""
AGAIN_S = 0.05
"""Seconds until the next try there."""
LONGEST_WHAT = 1000
"""Characters of a datagram's sentence."""

_log = logging.getLogger("ds_slide")


@dataclass(frozen=True)
class State:
    """The state of one rank. `stands_s`: seconds for which its training has stood still, and nothing has come
    forward."""

    stands_s: float = 0.0
    what: str = ""
    """Who waits for what there, or why it has ended."""
    closed: bool = False
    """Whether its engine has ended."""


@dataclass(frozen=True)
class Process:
    """One rank's process. `started`: clock ticks of its machine at its start, because numbers are used again."""

    host: str
    number: int
    started: str
    machine: str
    """The machine where its number means something: "" where nothing is known of processes."""

    @classmethod
    def own(cls) -> Process:
        number = os.getpid()
        status = _status(number)
        return cls(socket.gethostname(), number, "" if status is None else status[1], _machine() if status else "")

    @property
    def is_near(self) -> bool:
        """Whether the operating system here knows of it."""
        return bool(self.machine) and self.machine == _machine()

    def is_gone(self) -> bool:
        """Whether a process of this machine is gone."""
        status = _status(self.number)
        return status is None or status[0] in "ZX" or status[1] != self.started

    def is_stopped(self) -> bool:
        """Whether a debugger, or a signal, holds a process of this machine."""
        status = _status(self.number)
        return status is not None and status[0] in "tT"


@dataclass(frozen=True)
class Peer:
    """Another rank as it is seen from here."""

    rank: int
    process: Process
    state: State
    silent_s: float
    """Seconds since it was last heard of."""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"rank {self.rank} (process {self.process.number} on {self.process.host})")

    @property
    def is_gone(self) -> bool:
        return self.process.is_near and self.process.is_gone()

    @property
    def has_ended(self) -> bool:
        """Whether its engine, or its process, has ended."""
        return self.state.closed or self.is_gone

    def stands(self, limit_s: float) -> bool:
        """Whether it waits, too, and nothing has come forward there for as long. A rank that is two looks behind
        counts, and one that has not been heard of, unless a debugger holds it."""
        if self.process.is_near and self.process.is_stopped():
            return False
        return self.state.stands_s >= 0.9 * limit_s or self.silent_s >= limit_s

    def __str__(self) -> str:
        return f"{self.name} is gone" if self.is_gone else f"{self.name} has ended its engine"


Exchange = Callable[[Any, str], list[Any]]
"""(what this rank gives, what for) -> what every rank gives, by rank (`Ranks.exchange`)"""


class Peers:
    """`tell` and `others` are called by the watchdog's thread, and at its close."""

    def __init__(
        self,
        rank: int,
        processes: Sequence[Process],
        addresses: Sequence[tuple[str, int]],
        secret: str,
        channel: socket.socket,
    ) -> None:
        """`processes` and `addresses` are by rank. `secret`: known to these ranks only. `channel`: bound to our own."""
        self._rank = rank
        self._processes = processes
        others = [other for other in range(len(processes)) if other != rank]
        self._addresses: dict[int, Any] = {other: tuple(addresses[other]) for other in others}
        self._secret = secret
        self._channel = channel
        channel.setblocking(False)
        self._turn = itertools.count()
        self._heard = dict.fromkeys(others, -1)
        """The number of each rank's last news."""
        self._known = dict.fromkeys(others, State())
        self._silent_s = dict.fromkeys(others, 0.0)

    @classmethod
    def of(cls, rank: int, exchange: Exchange) -> Peers | None:
        """The peers of this rank, which all ranks ask for together. None, on all of them, where datagrams do not pass
        between them."""
        channel, address = _open_channel()
        told = exchange((asdict(Process.own()), address, secrets.token_hex(16)), "telling where a watchdog is reached")
        peers = cls(rank, [Process(**one[0]) for one in told], [one[1] for one in told], told[0][2], channel)
        if all(exchange(peers._hear_everyone(), "telling which watchdogs were heard")):
            return peers
        peers.close()
        _log.warning(
            "ds_slide.hang_timeout has no effect: datagrams (UDP) do not pass between the machines, so that the ranks "
            "cannot tell each other how they are"
        )
        return None

    def tell(self, state: State, passed_s: float = 0.0) -> None:
        """Let the others know. `passed_s`: since the last time, in which they may have been silent."""
        state = replace(state, what=state.what[:LONGEST_WHAT])
        datagram = json.dumps([self._secret, self._rank, next(self._turn), asdict(state)]).encode()
        for address in self._addresses.values():
            with contextlib.suppress(OSError):  # a machine that is gone: its silence tells
                self._channel.sendto(datagram, address)
        for rank in self._silent_s:
            self._silent_s[rank] += passed_s
        self._hear()

    def others(self) -> list[Peer]:
        """The other ranks, as they have told last."""
        self._hear()
        for rank in self._silent_s:
            if self._processes[rank].is_near and self._processes[rank].is_stopped():
                self._silent_s[rank] = 0.0  # once it goes on it may take a moment to say so
        return [Peer(rank, self._processes[rank], self._known[rank], self._silent_s[rank]) for rank in self._known]

    def close(self) -> None:
        self._channel.close()

    def _hear(self) -> None:
        with contextlib.suppress(OSError):  # nothing is left, or closed
            while True:
                datagram, address = self._channel.recvfrom(1 << 16)
                try:
                    secret, rank, turn, state = json.loads(datagram)
                    if secret == self._secret and turn > self._heard[rank]:
                        self._heard[rank], self._known[rank], self._silent_s[rank] = turn, State(**state), 0.0
                        self._addresses[rank] = address  # the one that was told may be right on that machine only
                except (ValueError, TypeError, KeyError):
                    continue  # a stranger's

    def _hear_everyone(self) -> bool:
        """Whether every other rank has been heard. Afterwards every one of them can have heard this rank."""
        deadline = time.monotonic() + HEAR_S
        while time.monotonic() < deadline and -1 in self._heard.values():
            self.tell(State())
            select.select([self._channel], [], [], AGAIN_S)
        for _ in range(3):  # now to addresses that are known to be right; one of them arrives
            self.tell(State())
        return -1 not in self._heard.values()


def _open_channel() -> tuple[socket.socket, tuple[str, int]]:
    """A socket for datagrams, and the address under which the other ranks reach it."""
    try:
        found = socket.getaddrinfo(os.environ.get("MASTER_ADDR", "127.0.0.1"), 9, type=socket.SOCK_DGRAM)
        family, *_, master = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(master)  # sends nothing: it asks for the way there
            own = str(probe.getsockname()[0])
    except OSError:
        family, own = socket.AF_INET, "127.0.0.1"
    channel = socket.socket(family, socket.SOCK_DGRAM)
    channel.bind(("", 0))
    return channel, (own, channel.getsockname()[1])


@functools.cache
def _machine() -> str:
    """The same for processes that see each other's numbers; "" where that cannot be known."""
    try:
        return machine.identity("pid")
    except OSError:
        return ""


def _status(number: int) -> tuple[str, str] | None:
    """(state, start) of a process of this machine, None when there is none."""
    try:
        with open(f"/proc/{number}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0].decode(), fields[19].decode()
