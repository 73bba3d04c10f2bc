"""Ends a run that hangs, with one sentence that says who waits for what, on every rank.

A run hangs when its training stands still (a thread that is not the engine's own waits for the engine, or the GPU is
in a collective), and in all of `limit_s` nothing has come forward: no hand-over between threads, no request of the
disk, no work of the GPU other than a collective, and nothing on the other ranks of this machine either. While the
script's own code runs on one rank (it computes, reads data, or stands in a debugger) no rank hangs: the others wait.
A wait for a rank of another machine is never judged here: the time-out of the process group ends it.

Time counts in looks, each for as much as lies between two of them: a process that was stopped (a debugger, a suspended
machine) has not waited meanwhile.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import THREAD_PREFIX, Failures, Wait
from ds_slide.runtime.core.ranks.peers import Peer, State

LONGEST_LOOK_S = 5.0
LOOKS = 20
"""Within the limit, at least."""
GRACE_S = 30.0
"""Seconds for the threads of a run that has been ended, half the limit at most. Who still waits then is inside a call
that nothing ends from outside (NCCL, gloo, the driver), and the process is ended."""
LOST_S = 10.0
"""How long a rank waits for one that has ended before that is taken for the reason, half the limit at most: it may be
about to end itself."""
BLAME_S = 5.0
"""Seconds in which the end of a rank has to show after a collective has failed."""
LAST_S = 10.0
"""Seconds for each of the last acts of a process. A terminal that hangs must not keep it."""
MOST_NAMED = 8
"""Other ranks whose waits a message has; one may stand for a thousand."""

_log = logging.getLogger("ds_slide")


class PeerStates(Protocol):
    """The other ranks of this machine (`ds_slide.runtime.core.ranks.peers.Peers`)."""

    def tell(self, state: State) -> None: ...
    def others(self) -> list[Peer]: ...
    def close(self) -> None: ...


class Watchdog:
    """A thread of its own, from `start` on. `progress`: counters of what moves without a hand-over, such as the disk's
    bytes."""

    _of_process: ClassVar[list[Watchdog]] = []
    """One for each engine: a rank that stands still in one of its engines does so in all."""

    def __init__(
        self,
        failures: Failures,
        device: Device,
        limit_s: float,
        progress: Sequence[Callable[[], object]] = (),
        peers: PeerStates | None = None,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._failures = failures
        self._device = device
        self._limit_s = limit_s
        self._look_s = min(LONGEST_LOOK_S, limit_s / LOOKS)
        self._progress = progress
        self._peers = peers
        self._end_process = end_process
        self._seen: object = None
        self._since = 0.0
        """Seconds for which the training has stood still and nothing has come forward."""
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
        """Look no more. The other ranks hear that this engine has ended, and `why` if not by the script's will.
        Harmless in a forked child, whose parent's engine goes on, and when called twice."""
        if os.getpid() != self._owner or self not in Watchdog._of_process:
            return
        Watchdog._of_process.remove(self)
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(LAST_S)
            if self._thread.is_alive():
                _log.warning("the watchdog is inside a call that does not return, and is left there")
        if self._peers is not None:
            self._peers.tell(self._state if self._state.closed else State(closed=True, what=why))
            self._peers.close()

    def _run(self) -> None:
        self._device.enter_thread()
        before = time.monotonic()
        while not self._closed.wait(self._look_s):
            now = time.monotonic()
            message = self._judge(now - before)
            before = now
            if message is not None:
                self._end(message)
                return

    def _judge(self, passed_s: float) -> str | None:
        """A look, and its verdict. One that fails counts as if something had come forward."""
        try:
            self._look(min(passed_s, 2 * self._look_s))
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
        seen = (self._failures.progress, *(counter() for counter in self._progress))
        stands = seen == self._seen and (collective is not None or any(wait.of_client for wait in waits))
        works = stands and collective is None and self._device.is_working()
        self._since = self._since + passed_s if stands and not works else 0.0
        self._seen = seen
        failure = self._failures.message
        # An engine that has failed takes part in nothing any more, whatever the script makes of its exception.
        what = failure or self._describe(waits, collective)
        self._state = State(stands_s=self._since, what=what, closed=bool(failure))
        if self._peers is not None:
            states = [watchdog._state for watchdog in tuple(Watchdog._of_process) if not watchdog._state.closed]
            told = self._state if failure else max([self._state, *states], key=lambda state: state.stands_s)
            self._peers.tell(told)

    def _verdict(self) -> str | None:
        """Why the run is to end, None while it may go on."""
        others = self._peers.others() if self._peers is not None else []
        ended = [peer for peer in others if peer.has_ended]
        if ended and self._since >= min(LOST_S, self._limit_s / 2) and self._waits_for_ranks():
            return f"{self._says(others)}; {'; '.join(map(str, ended[:MOST_NAMED]))}: look there for the cause"
        if self._peers is None and self._waits_for_ranks():
            return None  # ranks of other machines: the process group has its own time-out
        if self._since >= self._limit_s and all(peer.has_ended or peer.stands(self._limit_s) for peer in others):
            return (
                f"nothing has come forward for {self._since:.0f} s: {self._says(others)}; resume from the last "
                "checkpoint and report this message (ds_slide.hang_timeout sets the time, 0 switches this off)"
            )
        return None

    def _who_has_ended(self) -> str:
        """Who has ended, when a collective has failed: what broke the connection may be heard of a moment later."""
        assert self._peers is not None
        deadline = time.monotonic() + BLAME_S
        while not (ended := [peer for peer in self._peers.others() if peer.has_ended]):
            if time.monotonic() > deadline or self._closed.wait(self._look_s):
                break
        return "; ".join(f"{peer}: {peer.state.what}" if peer.state.what else str(peer) for peer in ended[:MOST_NAMED])

    def _waits_for_ranks(self) -> bool:
        return self._failures.oldest_outstanding() is not None or any(wait.for_ranks for wait in self._failures.waits())

    def _says(self, others: Sequence[Peer]) -> str:
        own = self._describe(self._failures.waits(), self._failures.oldest_outstanding())
        named = sorted((peer for peer in others if peer.state.what), key=lambda peer: not peer.has_ended)
        return "; ".join([own, *(f"{peer.name}: {peer.state.what}" for peer in named[:MOST_NAMED])])

    @staticmethod
    def _describe(waits: Sequence[Wait], collective: str | None) -> str:
        """Who waits for what, those who train first."""
        ordered = sorted(waits, key=lambda wait: not wait.of_client)
        parts = [f"{wait.thread} waits for {wait.what}" for wait in ordered]
        if collective is not None:
            parts.append(f"the GPU is in, or waits for, {collective}")
        return "; ".join(parts)

    def _end(self, message: str) -> None:
        self._state = State(closed=True, what=f"ended by its watchdog: {self._says(())}")
        if self._peers is not None:
            self._peers.tell(self._state)
        # In a thread of its own: to wake somebody takes a lock, which somebody who hangs may hold.
        threading.Thread(target=self._failures.end, args=(message,), name=f"{THREAD_PREFIX}end", daemon=True).start()
        while not self._closed.wait(self._look_s):
            if self._grace_is_over(self._look_s):
                self._end_by_force(message)
                return

    def _grace_is_over(self, passed_s: float) -> bool:
        """Whether somebody has been waiting for so long although the run has ended."""
        stuck = self._failures.oldest_outstanding() or any(wait.of_client for wait in self._failures.waits())
        self._stuck_s = self._stuck_s + passed_s if stuck else 0.0
        return self._stuck_s >= min(GRACE_S, self._limit_s / 2)

    def _end_by_force(self, message: str) -> None:
        first = self._failures.message  # of a lane, if that has failed before: then it is the cause

        def say() -> None:
            sys.stderr.write(f"ds_slide: {first or message}\n")
            sys.stderr.flush()

        for act in (sys.stdout.flush, say):
            thread = threading.Thread(target=act, name=f"{THREAD_PREFIX}end", daemon=True)
            thread.start()
            thread.join(LAST_S)
        self._end_process(1)
