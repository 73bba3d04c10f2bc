"""Ends a run that hangs, with one sentence that says who waits for what, on every rank.

A run hangs when its training stands still (a thread that is not the engine's own waits for the engine, or the GPU is
in a collective), and in all of `limit_s` nothing has come forward: no hand-over between threads, no request of the
disk, no work of the GPU other than a collective, and, with several ranks, nothing on the other ranks either. While the
script's own code runs on one rank (it computes, reads data, or stands in a debugger) no rank hangs: the others wait.

Time counts in looks, each for as much as lies between two of them: a process that was stopped (a debugger, a suspended
machine) has not waited meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ds_slide.runtime.device import Device
from ds_slide.runtime.handoff import THREAD_PREFIX, Failures, Wait
from ds_slide.runtime.peers import Peer, State

LONGEST_LOOK_S = 5.0
LOOKS = 20
"""Within the limit, at least."""
GRACE_S = 30.0
"""For the threads of a run that has been ended. Who still waits then is inside a call that nothing ends from outside
(NCCL, gloo, the driver), and the process is ended."""
LOST_S = 10.0
"""How long a rank waits for one that has ended before that is taken for the reason: it may be about to end itself."""


class PeerStates(Protocol):
    """The other ranks (`ds_slide.runtime.peers.Peers`)."""

    def tell(self, state: State) -> None: ...
    def others(self) -> list[Peer]: ...


class Watchdog:
    """A thread of its own. `progress`: counters of what moves without a hand-over, such as the disk's bytes. `last`:
    called before the process is ended, to remove what would be left behind."""

    def __init__(
        self,
        failures: Failures,
        device: Device,
        limit_s: float,
        progress: Sequence[Callable[[], object]] = (),
        peers: PeerStates | None = None,
        last: Callable[[], None] = lambda: None,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._failures = failures
        self._device = device
        self._limit_s = limit_s
        self._look_s = min(LONGEST_LOOK_S, limit_s / LOOKS)
        self._progress = progress
        self._peers = peers
        self._last = last
        self._end_process = end_process
        self._seen: object = None
        self._since = 0.0
        """Seconds for which the training has stood still and nothing has come forward."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more looks. The other ranks hear that this engine has ended."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._peers is not None:
            self._peers.tell(State(closed=True))

    def _run(self) -> None:
        self._device.enter_thread()
        before = time.monotonic()
        while not self._closed.wait(self._look_s):
            now = time.monotonic()
            self._look(min(now - before, 2 * self._look_s))
            before = now
            message = self._verdict()
            if message is not None:
                self._end(message)
                return

    def _look(self, passed_s: float) -> None:
        collective = self._failures.oldest_outstanding()
        waits = self._failures.waits()
        seen = (self._failures.progress, *(counter() for counter in self._progress))
        stands = collective is not None or any(wait.of_client for wait in waits)
        works = collective is None and self._device.is_working()
        self._since = self._since + passed_s if stands and not works and seen == self._seen else 0.0
        self._seen = seen
        if self._peers is not None:
            self._peers.tell(State(stands_s=self._since, what=self._describe(waits, collective)))

    def _verdict(self) -> str | None:
        """Why the run is to end, None while it may go on."""
        others = self._peers.others() if self._peers is not None else []
        ended = [peer for peer in others if peer.has_ended]
        if ended and self._since >= min(LOST_S, self._limit_s):
            return f"{self._says(others)}; {'; '.join(map(str, ended))}: look there for the cause"
        if self._since >= self._limit_s and all(peer.has_ended or peer.stands(self._limit_s) for peer in others):
            return (
                f"nothing has come forward for {self._since:.0f} s: {self._says(others)}; resume from the last "
                "checkpoint and report this message (ds_slide.hang_timeout sets the time, 0 switches this off)"
            )
        return None

    def _says(self, others: Sequence[Peer]) -> str:
        own = self._describe(self._failures.waits(), self._failures.oldest_outstanding())
        return "; ".join([own, *(f"{peer.name}: {peer.state.what}" for peer in others if peer.state.what)])

    @staticmethod
    def _describe(waits: Sequence[Wait], collective: str | None) -> str:
        """Who waits for what, those who train first."""
        ordered = sorted(waits, key=lambda wait: not wait.of_client)
        parts = [f"{wait.thread} waits for {wait.what}" for wait in ordered]
        if collective is not None:
            parts.append(f"the GPU is in, or waits for, {collective}")
        return "; ".join(parts)

    def _end(self, message: str) -> None:
        if self._peers is not None:
            self._peers.tell(State(closed=True, what=f"ended by its watchdog: {self._says(())}"))
        self._failures.end(message)
        waited_s = 0.0
        while not self._closed.wait(self._look_s):
            stuck = self._failures.oldest_outstanding() or any(wait.of_client for wait in self._failures.waits())
            waited_s = waited_s + self._look_s if stuck else 0.0
            if waited_s >= min(GRACE_S, self._limit_s):
                sys.stderr.write(f"ds_slide: {message}\n")
                sys.stderr.flush()
                self._last()
                self._end_process(1)
                return
