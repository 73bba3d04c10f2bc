"""Logical threads that run one at a time, and the choice of which one goes on.

Every thread of the engine is a greenlet of one operating-system thread. Before an operation on something that threads
share, a thread announces the operation and asks the scheduler who goes on; a thread whose operation cannot be done yet
(a lock that is held, an event that is not set) is not asked for. So a run is decided by the list of these choices.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import greenlet
import torch

from liveness.outcome import Outcome, Wait, describe, stack_of

POLL_LIMIT_S = 5.0
"""A wait with a shorter time limit is a poll: it may end when nothing else can run. Longer ones count as unlimited."""
MOST_ROUNDS_OF_POLLS = 30
MOST_POINTS = 200_000


class Killed(BaseException):
    """Ends a logical thread of a run that is over."""


class Operation:
    """What a thread is about to do to `target`. It can be done when `ready()`; without `ready`, always."""

    __slots__ = ("expired", "kind", "ready", "target", "timeout")

    def __init__(
        self, kind: str, target: Any, ready: Callable[[], bool] | None = None, timeout: float | None = None
    ) -> None:
        self.kind = kind
        self.target = target
        self.ready = ready
        self.timeout = timeout
        self.expired = False

    def options(self) -> Sequence[Any]:
        """What it can be done with; nothing while it cannot be done."""
        return _ONE if self.expired or self.ready is None or self.ready() else ()


_ONE = (None,)


class LogicalThread:
    def __init__(self, scheduler: Scheduler, number: int, name: str, run: Callable[[], None], rank: int) -> None:
        self.number = number
        self.name = name
        self.rank = rank
        self.finished = False
        self.started = False
        self.error: BaseException | None = None
        self.pending: Operation = Operation("start", self)
        self.option: Any = None
        self._scheduler = scheduler
        self._run = run
        self.greenlet = greenlet.greenlet(self._body, scheduler.hub)

    @property
    def is_watchdog(self) -> bool:
        return "watchdog" in self.name

    def _body(self) -> None:
        self.started = True
        torch.set_grad_enabled(True)  # as in every new thread
        try:
            self._run()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
            self._scheduler.on_thread_error(self, error)
        finally:
            self.finished = True

    def frames(self) -> list[Any]:
        """Python frames of a thread that does not run, innermost first."""
        frames, frame = [], self.greenlet.gr_frame
        if frame is None and not self.finished and self.started:
            frame = sys._getframe()
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return frames


@dataclass(frozen=True)
class Choice:
    thread: LogicalThread
    option: Any

    @property
    def label(self) -> str:
        name = self.thread.name if self.option is None else f"{self.thread.name}[{self.option}]"
        return name if not self.thread.rank else f"rank 1: {name}"


Chooser = Callable[["Scheduler", list[Choice]], int]
"""-> index of the choice, or raises Stop."""


class Stop(Exception):
    """Raised by a chooser: this run has nothing new to show."""


_active: Scheduler | None = None


def active() -> Scheduler | None:
    """The scheduler whose threads run now."""
    return _active


class Scheduler:
    """One run. `chooser` is asked wherever several threads (or completions) can go on."""

    def __init__(self, chooser: Chooser, *, keep_labels: bool = True) -> None:
        self.hub = greenlet.getcurrent()
        self.threads: list[LogicalThread] = []
        self.current: LogicalThread | None = None
        self.chooser = chooser
        self.exploring = False
        """Off while the engine is built and after the part that is explored: then the first choice is taken."""
        self.leave_threads = False
        """The run is over when the computing threads have ended, whatever the others do."""
        self.dying = False
        self.may_fail = True
        """Whether a lane may fail, or the engine be closed while somebody waits, and the run be right all the same."""
        self.points = 0
        self.objects = 0
        self.disks: list[Any] = []
        self.tell: list[Callable[[], str]] = []
        """What else to say of a deadlock."""
        self._keep_labels = keep_labels
        self._choices: list[int] = []
        self._labels: list[str] = []
        self._next: Choice | None = None
        self._ended: Outcome | None = None
        self._main: list[LogicalThread] = []

    # ---- called by logical threads -----------------------------------------------------------------------------------

    def spawn(self, name: str, run: Callable[[], None]) -> LogicalThread:
        rank = 0 if self.current is None else self.current.rank
        thread = LogicalThread(self, len(self.threads), name, run, rank)
        self.threads.append(thread)
        return thread

    def do(self, operation: Operation) -> Any:
        """Return when the calling thread may do `operation`: the option that was chosen for it."""
        me = self.current
        if self.dying or me is None:
            if self.dying and operation.ready is not None and not operation.options():
                raise Killed
            return None
        me.pending = operation
        self._pass_on(me)
        if self.dying:
            raise Killed
        option, me.option = me.option, None
        return option

    def on_thread_error(self, thread: LogicalThread, error: BaseException) -> None:
        if self._ended is None and not self.dying:
            text = "".join(traceback.format_exception(error)[-12:])
            self._ended = self._outcome("error", f"{thread.name} raised {type(error).__name__}: {error}\n{text}")

    def _pass_on(self, me: LogicalThread) -> None:
        choice = self._choose()
        # Whether gradients are recorded is a setting of the operating system's thread, which all greenlets share.
        records_gradients = torch.is_grad_enabled()
        if choice is None:
            self.hub.switch()
        else:
            choice.thread.option = choice.option
            if choice.thread is me:
                return
            self.current = choice.thread
            choice.thread.greenlet.switch()
        torch.set_grad_enabled(records_gradients)

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self, *mains: tuple[str, Callable[[], Any]]) -> Outcome:
        """Run until all of `mains` (one for each rank) have ended, or nothing can."""
        global _active
        previous, _active = _active, self
        records_gradients = torch.is_grad_enabled()
        results: list[Any] = [None] * len(mains)
        try:
            for rank, (name, work) in enumerate(mains):
                thread = self.spawn(name, lambda rank=rank, work=work: results.__setitem__(rank, work()))
                thread.rank = rank
                self._main.append(thread)
            while self._ended is None:
                choice = self._choose()
                if choice is None:
                    break
                choice.thread.option = choice.option
                self.current = choice.thread
                choice.thread.greenlet.switch()
            outcome = self._ended or self._outcome("done", "")
            outcome.result = results
            return outcome
        finally:
            self._kill()
            torch.set_grad_enabled(records_gradients)
            _active = previous

    def _outcome(self, kind: str, message: str) -> Outcome:
        return Outcome(kind, list(self._choices), list(self._labels), self.points, message=message)

    def _choose(self) -> Choice | None:
        """Who goes on; None when the run is over."""
        if self._ended is not None:
            return None
        if self.leave_threads and all(thread.finished for thread in self._main):
            return None
        self.points += 1
        if self.points > MOST_POINTS:
            self._ended = self._outcome("error", f"no end after {MOST_POINTS} points: does something spin?")
            return None
        choices = self.choices()
        if not choices:
            choices = self._after_polls()
            if not choices:
                return None
        if len(choices) == 1:
            return choices[0]
        if not self.exploring:
            return choices[0]
        try:
            index = self.chooser(self, choices)
        except Stop as stop:
            self._ended = self._outcome("stopped", str(stop))
            return None
        self._choices.append(index)
        if self._keep_labels:
            self._labels.append(choices[index].label)
        return choices[index]

    def choices(self) -> list[Choice]:
        return [
            Choice(thread, option)
            for thread in self.threads
            if not thread.finished
            for option in thread.pending.options()
        ]

    def _after_polls(self) -> list[Choice]:
        """Nothing can run: all polls time out once. What is then the same as before is a deadlock."""
        if all(thread.finished for thread in self._main):
            left = [thread for thread in self.threads if not thread.finished and not thread.is_watchdog]
            if left:
                self._ended = self._outcome("error", "threads are left after the end")
                self._ended.waits = self.waits()
            return []
        waits = self.waits()
        signature = tuple(map(str, waits))
        polls = [
            thread
            for thread in self.threads
            if not thread.finished
            and not thread.is_watchdog
            and thread.pending.timeout is not None
            and thread.pending.timeout < POLL_LIMIT_S
        ]
        rounds = getattr(self, "_rounds", 0)
        if polls and signature != getattr(self, "_stuck", None) and rounds < MOST_ROUNDS_OF_POLLS:
            self._stuck, self._rounds = signature, rounds + 1
            for thread in polls:
                thread.pending.expired = True
            return self.choices()[:1]
        self._ended = self._outcome("deadlock", "\n".join(["nothing can go on", *(tell() for tell in self.tell)]))
        self._ended.waits = waits
        return []

    def waits(self) -> list[Wait]:
        """Of all threads that have not ended."""
        return [
            Wait(
                Choice(thread, None).label,
                "waits for" if thread.pending.ready is not None else "is about to",
                f"{thread.pending.kind} of {describe(thread.pending.target)}",
                stack_of(thread.frames()),
            )
            for thread in self.threads
            if not thread.finished
        ]

    def _kill(self) -> None:
        self.dying = True
        for thread in self.threads:
            self.current = thread
            while not thread.finished:
                if not thread.started:
                    thread.finished = True
                    break
                thread.greenlet.throw(Killed)
        self.current = None
