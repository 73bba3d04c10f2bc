"""The update lane: CPU work on states. It always runs the ready task whose block is needed soonest.

A task is ready when its gradient has arrived in host memory (its marker has passed). Backward finishes the last block
first, but the next forward needs the first block first. First-in-first-out would update the first block last; with
deadlines the next forward waits for one update, not for all.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from ds_slide.report.statistics import LaneMeter
from ds_slide.runtime.core.device import PASSED, Device, Marker
from ds_slide.runtime.core.futures import THREAD_PREFIX, Failures, synchronize
from ds_slide.runtime.core.stream_lane import Delay

HOLDING = "gradient kept"
"""The name of a task that copies or adds a gradient to be held until the step."""
Turn = Literal["next", "later", "spare"]
"""The priority class of a task. "next" runs first, the unit that the next forward needs soonest before the others.
"later" is for tasks that no forward waits for, in the order of backward. "spare" is for optional tasks, in the order of
"next"."""
TURNS: tuple[Turn, ...] = get_args(Turn)


Urgency = tuple[int, int, int]
"""The smallest is the most urgent; no two tasks have the same."""


@dataclass(frozen=True)
class UpdateTask:
    """A task for the lane. `run` starts after `ready`, owns the unit's state buffers, and returns the bytes it moved
    through host memory."""

    order: int
    """The index of the unit (`Unit.order`)."""
    turn: Turn
    sequence: int
    ready: Marker
    run: Callable[[], int]
    what: str
    """The name of the task in the trace and the statistics."""

    @property
    def urgency(self) -> Urgency:
        return TURNS.index(self.turn), -self.order if self.turn == "later" else self.order, self.sequence


class UpdateWorker:
    """One thread that orders the tasks; the work inside a task is spread over the updater's own threads."""

    name = "update"

    def __init__(
        self, device: Device, failures: Failures, meter: LaneMeter, delay: Delay, *, idle: bool = False
    ) -> None:
        """Start the thread. `idle`: the lane gets no tasks, and has no thread."""
        self._device = device
        self._failures = failures
        self._meter = meter
        self._delay = delay
        self._changed = threading.Condition()
        self._waiting: deque[UpdateTask] = deque()
        """Tasks in the order of submission, until they are found to be ready."""
        self._ready: list[tuple[Urgency, UpdateTask]] = []
        """A heap of ready tasks."""
        self._sequence = 0
        self._unfinished = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        if not idle:
            self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}update", daemon=True)
            self._thread.start()
            failures.end_idle(self._end)

    def submit(
        self, order: int, ready: Marker, run: Callable[[], int], what: str = "update", turn: Turn = "next"
    ) -> None:
        assert self._thread is not None, "the update lane is idle"
        with self._changed:
            task = UpdateTask(order, turn, self._sequence, ready, run, what)
            if turn == "spare" and ready is PASSED:
                # The whole gradient of a block has arrived with its first span, whatever transfers were submitted
                # before.
                self._is_ready(task)
            else:
                self._waiting.append(task)
            self._sequence += 1
            self._unfinished += turn != "spare"
            self._changed.notify_all()

    def drain(self) -> None:
        """Block until every task submitted so far has run, except the optional tasks ("spare")."""
        with self._changed:
            self._failures.wait_for(self._changed, lambda: not self._unfinished, "the updates that are under way")

    def close(self) -> None:
        """End the thread after the tasks submitted so far; harmless when called twice."""
        self._end()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _end(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._device.enter_thread()
            while (task := self._next()) is not None:
                self._delay()
                synchronize(self._failures, task.ready, "a gradient on its way to its update")
                started = time.perf_counter()
                label, counts = (task.what, task.order), task.turn != "spare"
                with self._meter.named(label):
                    moved = task.run()
                task = None  # as in `StreamWorker`
                self._meter.add_span(started, time.perf_counter(), moved, label, holds=label[0] == HOLDING)
                with self._changed:
                    self._unfinished -= counts
                    self._changed.notify_all()
                self._failures.progressed()
        except BaseException as error:
            self._failures.record(self.name, error)

    def _next(self) -> UpdateTask | None:
        with self._changed:
            while not self._waiting and not self._ready:
                if self._closing:
                    return None
                self._changed.wait()
            # Transfers run in the order of submission, so the first waiting tasks are ready first, and the search stops
            # at the first task that is not. A search over all could find an early task not ready and, a moment later, a
            # late task ready. Then the spans of one unit would be updated out of order, and the last span gives their
            # common buffer back. No marker is queried again after it has passed: with 60 units that would be 2,000
            # queries of the GPU in a step.
            while self._waiting and self._waiting[0].ready.done():
                self._is_ready(self._waiting.popleft())
            return heapq.heappop(self._ready)[1] if self._ready else self._waiting.popleft()

    def _is_ready(self, task: UpdateTask) -> None:
        heapq.heappush(self._ready, (task.urgency, task))
