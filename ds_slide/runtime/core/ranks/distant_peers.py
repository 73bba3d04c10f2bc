"""The state of the ranks of several hosts, over a connection of its own (`ds_slide.runtime.core.ranks.peers` has those
of one machine).

Rank 0 keeps a table (`torch.distributed.TCPStore`), and a thread of each rank writes a line to it and reads the lines
of the others every `BEAT_S`. A line counts up, so silence is measured by the reader's clock alone: clocks of hosts may
differ. No other thread uses the connection, because a call on a link that drops all packets does not return.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_slide.runtime.core.futures import THREAD_PREFIX
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.ranks.peers import TEXT_BYTES, Peer, State

BEAT_S = 1.0
"""Seconds between two lines of a rank."""
CONNECT_S = 30.0
"""The longest that a rank tries to reach rank 0's table."""

_log = logging.getLogger("ds_slide")


@dataclass(frozen=True)
class _Address:
    """A rank's host and process. `port`: of rank 0's table; 0 on other ranks, and where there is no table."""

    host: str
    process: int
    port: int


class _Heard:
    """The newest line of a rank."""

    def __init__(self) -> None:
        self.line = b""
        self.at = time.monotonic()
        self.state = State()

    def hear(self, line: bytes) -> None:
        if line == self.line:
            return
        self.line, self.at = line, time.monotonic()
        _, stands_s, what, closed = json.loads(line)
        self.state = State(stands_s, what, closed)


class DistantPeers:
    """The other ranks, on whatever hosts. The watchdog's thread calls `tell` and `others`, and so does its close."""

    def __init__(self, table: Any, rank: int, addresses: list[_Address]) -> None:
        """`table`: this rank's connection to the table. `addresses`: by rank. All ranks have written a line."""
        self._table = table
        self._rank = rank
        self._addresses = addresses
        self._heard = {other: _Heard() for other in range(len(addresses)) if other != rank}
        self._own = State()
        self._beats = 0
        self._lost_table = False
        """Whether rank 0, which keeps the table, has closed the connection."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}peers", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, ranks: Ranks) -> DistantPeers | None:
        """Connect the ranks. Returns None on all ranks, with a line of the log, if one cannot be connected. Collective.

        The table is at `MASTER_ADDR`, the host of rank 0, which the launcher has told all ranks. Ranks without it have
        been started by other means, and no address is known to serve."""
        master = os.environ.get("MASTER_ADDR", "")
        table, problem = _connected(master, 0, 0) if ranks.rank == 0 else (None, "")
        own = _Address(socket.gethostname(), os.getpid(), table.port if table is not None else 0)
        addresses = ranks.exchange(own, "telling the hosts of the ranks")
        if ranks.rank and addresses[0].port:
            table, problem = _connected(master, addresses[0].port, ranks.rank)
        problems = ranks.exchange(problem, "connecting the watchdogs of the hosts")
        if any(problems):
            if ranks.rank == 0:
                rank, text = next((rank, text) for rank, text in enumerate(problems) if text)
                _log.warning(
                    "a host that vanishes is noticed by the time-out of the process group alone: rank %d has no "
                    "connection to rank 0 (%s)",
                    rank,
                    text,
                )
            return None
        return cls(table, ranks.rank, addresses)

    def tell(self, state: State) -> None:
        """Tell the other ranks the state of this one, with the next line."""
        self._own = state

    def others(self) -> list[Peer]:
        """Return the other ranks with the states that they told last."""
        now = time.monotonic()
        return [
            Peer(
                rank,
                self._addresses[rank].process,
                heard.state,
                is_gone=self._lost_table and rank == 0,
                host=self._addresses[rank].host,
                silent_s=now - heard.at,
            )
            for rank, heard in self._heard.items()
        ]

    def close(self) -> None:
        """End the thread, behind a last line. A thread that stands in a call on a broken link is left there."""
        self._closed.set()
        self._thread.join(2 * BEAT_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(BEAT_S)
            try:
                self._beat()
            except (RuntimeError, OSError):
                self._lost_table = True
                return

    def _beat(self) -> None:
        self._beats += 1
        self._table.set(_key(self._rank), _line(self._beats, self._own))
        lines = self._table.multi_get([_key(rank) for rank in self._heard])
        for heard, line in zip(self._heard.values(), lines, strict=True):
            heard.hear(line)


def _connected(master: str, port: int, rank: int) -> tuple[Any, str]:
    """Return the table, with a first line of this rank, or None and the reason. `port`: 0 where rank 0 makes it."""
    if not master:
        return None, "MASTER_ADDR is not set"
    limit = timedelta(seconds=CONNECT_S)
    try:
        table: Any = dist.TCPStore(master, port, is_master=rank == 0, timeout=limit, wait_for_workers=False)
        table.set(_key(rank), _line(0, State()))
    except (RuntimeError, OSError) as error:
        return None, str(error).partition("\n")[0]
    return table, ""


def _key(rank: int) -> str:
    return f"rank {rank}"


def _line(beat: int, state: State) -> bytes:
    return json.dumps([beat, state.stands_s, state.what[:TEXT_BYTES], state.closed]).encode()
