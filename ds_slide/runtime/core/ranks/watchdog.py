"""Ends a run that hangs, with one message that says which thread waits for what, on every rank.

A run hangs when its training stands still and there is no progress for `limit_s`. The training stands still while a
thread that is not the engine's own waits for the engine, or the GPU is in a collective. Progress is a hand-over between
threads, a request of the disk, work of the GPU other than a collective, or any of these on another rank. While the
script's own code runs on one rank (it computes, reads data, or is stopped in a debugger) no rank hangs: the others
wait. A rank of another host also has to be heard from: a process that a debugger has stopped counts as lost there. If
the ranks of several hosts could not be connected, a wait for a rank is not judged: the time-out of the process group
ends it.

Time is added up from check to check, at most twice the planned interval each: a process that was stopped (a debugger, a
suspended machine) has not waited meanwhile.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import THREAD_PREFIX, Failures, Wait
from ds_slide.runtime.core.ranks.peers import Peer, State

MOST_NAMED = 8
"""The most other ranks that a message names; there may be a thousand."""

_log = logging.getLogger("ds_slide")


@dataclass(frozen=True)
class Times:
    """Seconds that the watchdog waits, for a limit of `limit_s`."""

    limit_s: float
    blame_s: float = 5.0
    """Wait for the end of a rank to become visible after a collective has failed."""
    beats_s: float = 3.0
    """The same, of a rank of another host, when a collective has failed: three lines are missing."""
    last_s: float = 10.0
    """Wait for each of the last actions of a process. A terminal that hangs must not keep the process alive."""

    @property
    def look_s(self) -> float:
        """Seconds between two checks. At least 20 checks are within the limit."""
        return min(5.0, self.limit_s / 20)

    @property
    def grace_s(self) -> float:
        """Time for the threads of an ended run to finish. A thread that still waits then is inside a call that cannot
        be ended from outside (NCCL, gloo, the driver), and the process is ended."""
        return min(30.0, self.limit_s / 2)

    @property
    def silence_s(self) -> float:
        """Time without a line from a rank of another host before it counts as lost."""
        return min(60.0, self.limit_s / 2)

    @property
    def lost_s(self) -> float:
        """Time that a rank waits for an ended rank before it reports that as the cause: the waiting rank may be about
        to end itself."""
        return min(10.0, self.limit_s / 2)


class PeerStates(Protocol):
    """The other ranks: `Peers` of one machine, or `DistantPeers` of several (both in `runtime/core/ranks`)."""

    def tell(self, state: State) -> None: ...
    def others(self) -> list[Peer]: ...
    def close(self) -> None: ...


class Moves(Protocol):
    """A store of the SSD tier (`ds_slide.store.ssd.store.SsdStore`)."""

    def moved_bytes(self) -> int: ...


class Watchdog:
    """A thread that watches the engine from `start` on. `stores`: their transfers are progress without a hand-over. The
    thread must not keep the engine alive, so it knows this list, which may be filled later, and not the parts that use
    the stores."""

    _of_process: ClassVar[list[Watchdog]] = []
    """One watchdog for each engine: a rank that stands still in one of its engines does so in all."""
    _end_process = staticmethod(os._exit)

    def __init__(
        self,
        failures: Failures,
        device: Device,
        limit_s: float,
        stores: Sequence[Moves] = (),
        peers: PeerStates | None = None,
    ) -> None:
        self._failures = failures
        self._device = device
        self._times = Times(limit_s)
        self._stores = stores
        self._peers = peers
        self._seen: object = None
        self._since = 0.0
        """Seconds since the last progress of a training that stands still."""
        self._state = State()
        self._is_blind = False
        self._stuck_s = 0.0
        self._owner = os.getpid()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}watchdog", daemon=True)

    def start(self) -> None:
        Watchdog._of_process.append(self)
        if self._peers is not None:
            self._failures.who_has_ended = self._who_has_ended
        self._thread.start()

    def close(self, why: str = "") -> None:
        """End the watchdog. The other ranks are told that this engine has ended, and `why` unless the script ended it.
        Harmless in a forked child, whose parent's engine goes on, and when called twice."""
        if os.getpid() != self._owner or self not in Watchdog._of_process:
            return
        Watchdog._of_process.remove(self)
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._times.last_s)
            if self._thread.is_alive():
                _log.warning("the watchdog is inside a call that does not return, and is left there")
        if self._peers is not None:
            self._peers.tell(self._state if self._state.closed else State(closed=True, what=why))
            self._peers.close()

    def _run(self) -> None:
        self._device.enter_thread()
        before = time.monotonic()
        while not self._closed.wait(self._times.look_s):
            now = time.monotonic()
            message = self._judge(now - before)
            before = now
            if message is not None:
                self._end(message)
                return

    def _judge(self, passed_s: float) -> str | None:
        """Return the verdict of one check. A check that fails counts as progress."""
        try:
            self._look(min(passed_s, 2 * self._times.look_s))
            return self._verdict()
        except Exception as error:
            self._since, self._state = 0.0, State()
            if self._peers is not None:
                self._peers.tell(self._state)
            if not self._is_blind:
                _log.warning("ds_slide.hang_timeout may have no effect: %s: %s", type(error).__name__, error)
            self._is_blind = True
            return None

    def _look(self, passed_s: float) -> None:
        collective = self._failures.oldest_outstanding()
        waits = self._failures.waits()
        seen = (self._failures.progress, *(store.moved_bytes() for store in self._stores))
        stands = seen == self._seen and (collective is not None or any(wait.of_client for wait in waits))
        works = stands and collective is None and self._device.is_working()
        self._since = self._since + passed_s if stands and not works else 0.0
        self._seen = seen
        failure = self._failures.message
        # A failed engine takes part in nothing any more, whatever the script does with its exception.
        what = failure or self._describe(waits, collective)
        self._state = State(stands_s=self._since, what=what, closed=bool(failure))
        if self._peers is not None:
            states = [watchdog._state for watchdog in tuple(Watchdog._of_process) if not watchdog._state.closed]
            told = self._state if failure else max([self._state, *states], key=lambda state: state.stands_s)
            self._peers.tell(told)

    def _verdict(self) -> str | None:
        """Return why the run must end; None while it may go on."""
        others = self._peers.others() if self._peers is not None else []
        ended = [peer for peer in others if peer.is_lost(self._times.silence_s)]
        if ended and self._since >= self._times.lost_s and self._waits_for_ranks():
            return f"{self._says(others)}; {_named(ended)}: look there for the cause"
        if self._peers is None and self._waits_for_ranks():
            return None  # nothing is known of the other ranks: the process group has its own time-out
        limit_s = self._times.limit_s
        if self._since >= limit_s and all(peer in ended or peer.stands(limit_s) for peer in others):
            beside = f"; {_named(ended)}" if ended else ""
            return (
                f"nothing has come forward for {self._since:.0f} s: {self._says(others)}{beside}; resume from the last "
                "checkpoint and report this message (ds_slide.hang_timeout sets the time, 0 switches this off)"
            )
        return None

    def _who_has_ended(self) -> str:
        """Return which ranks have ended, after a collective has failed. The end of a rank may become visible a moment
        after the connection breaks."""
        assert self._peers is not None
        deadline = time.monotonic() + self._times.blame_s
        while not (ended := [peer for peer in self._peers.others() if peer.is_lost(self._times.beats_s)]):
            if time.monotonic() > deadline or self._closed.wait(self._times.look_s):
                break
        return _named(ended, with_states=True)

    def _waits_for_ranks(self) -> bool:
        return self._failures.oldest_outstanding() is not None or any(wait.for_ranks for wait in self._failures.waits())

    def _says(self, others: Sequence[Peer]) -> str:
        own = self._describe(self._failures.waits(), self._failures.oldest_outstanding())
        named = sorted((peer for peer in others if peer.state.what), key=lambda peer: not peer.has_ended)
        return "; ".join([own, *(f"{peer.name}: {peer.state.what}" for peer in named[:MOST_NAMED])])

    @staticmethod
    def _describe(waits: Sequence[Wait], collective: str | None) -> str:
        """Return which thread waits for what, the threads of the training first."""
        ordered = sorted(waits, key=lambda wait: not wait.of_client)
        parts = [f"{wait.thread} waits for {wait.what}" for wait in ordered]
        if collective is not None:
            parts.append(f"the GPU is in, or waits for, {collective}")
        return "; ".join(parts)

    def _end(self, message: str) -> None:
        self._state = State(closed=True, what=f"ended by its watchdog: {self._says(())}")
        if self._peers is not None:
            self._peers.tell(self._state)
        # This runs in a thread of its own: waking a thread takes a lock, which a hanging thread may hold.
        threading.Thread(target=self._failures.end, args=(message,), name=f"{THREAD_PREFIX}end", daemon=True).start()
        while not self._closed.wait(self._times.look_s):
            if self._grace_is_over(self._times.look_s):
                self._end_by_force(message)
                return

    def _grace_is_over(self, passed_s: float) -> bool:
        """Whether a thread still waits after the grace period, although the run has ended."""
        stuck = self._failures.oldest_outstanding() or any(wait.of_client for wait in self._failures.waits())
        self._stuck_s = self._stuck_s + passed_s if stuck else 0.0
        return self._stuck_s >= self._times.grace_s

    def _end_by_force(self, message: str) -> None:
        first = self._failures.message  # an earlier failure of a lane is the cause

        def say() -> None:
            sys.stderr.write(f"ds_slide: {first or message}\n")
            sys.stderr.flush()

        for act in (sys.stdout.flush, say):
            thread = threading.Thread(target=act, name=f"{THREAD_PREFIX}end", daemon=True)
            thread.start()
            thread.join(self._times.last_s)
        self._end_process(1)


def _named(peers: Sequence[Peer], *, with_states: bool = False) -> str:
    """Return a text that names ranks, and says why they have ended if `with_states`."""
    said = [f"{peer}: {peer.state.what}" if with_states and peer.state.what else str(peer) for peer in peers]
    return "; ".join(said[:MOST_NAMED])
