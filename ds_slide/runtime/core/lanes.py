"""The lanes of an engine: threads that copy between the host and the GPU, and the thread that updates.

A stream lane runs its jobs in order, on CUDA with a stream of its own. The update lane does CPU work on states: it
always runs the ready task whose block is needed soonest.

A task is ready when its gradient has arrived in host memory (its marker has passed). Backward finishes the last block
first, but the next forward needs the first block first. First-in-first-out would update the first block last; with
deadlines the next forward waits for one update, not for all.
"""

from __future__ import annotations

import heapq
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ds_slide.report.statistics import LaneMeter
from ds_slide.runtime.core.device import PASSED, Device, Marker
from ds_slide.runtime.core.futures import THREAD_PREFIX, Failures, Future, synchronize

Job = Callable[[], None]


class Delay:
    """Random pauses before every job of every lane, for race tests: they must not change a bit of the result."""

    def __init__(self, milliseconds: float, seed: int) -> None:
        self._seconds = milliseconds / 1e3
        self._random = random.Random(seed)

    def __call__(self) -> None:
        if self._seconds > 0.0:
            time.sleep(self._random.uniform(0.0, self._seconds))


class _Lane:
    """A thread that works until it is closed, or until the first failure of any lane."""

    def __init__(self, name: str, device: Device, failures: Failures, *, idle: bool) -> None:
        """Start the thread, which uses the attributes of the whole object. `idle`: the lane gets no work, and has no
        thread."""
        self.name = name
        self.device = device
        self._failures = failures
        self._thread: threading.Thread | None = None
        if not idle:
            self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}{name}", daemon=True)
            self._thread.start()
            failures.end_idle(self)

    def end(self) -> None:
        """Let the thread end after the work submitted so far."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread after the work submitted so far, which ends by itself or by a failure. Harmless when called
        twice."""
        self.end()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.device.enter_thread()
            self._work()
        except BaseException as error:
            self._failures.record(self.name, error)

    def _work(self) -> None:
        raise NotImplementedError


class StreamWorker(_Lane):
    """Runs jobs first in, first out. A job may block its own lane (for a buffer, for an update), never another."""

    def __init__(
        self,
        name: str,
        device: Device,
        failures: Failures,
        meter: LaneMeter,
        delay: Delay,
        *,
        idle: bool = False,
        first: bool = False,
    ) -> None:
        """Start the thread. `idle`: the lane gets no jobs, and has no thread and no stream. `first`: its kernels run
        before those of other streams."""
        self.stream: Any = None if idle else device.stream(first=first)
        self.meter = meter
        self._delay = delay
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        super().__init__(name, device, failures, idle=idle)

    def submit(self, job: Job) -> None:
        assert self._thread is not None, f"the {self.name} lane is idle"
        self._jobs.put(job)

    def wait(self, marker: Marker, what: str) -> None:
        """Make the stream wait for `marker`, and trace the wait as `what`. Called by a job."""
        if not (self.device.is_cuda and self.meter.is_traced):
            self.device.wait(marker, self.stream)
            return
        before = self.device.mark(self.stream, timed=True)
        self.device.wait(marker, self.stream)
        self.meter.add_stream_wait(before, self.device.mark(self.stream, timed=True), what)

    def drain(self) -> None:
        """Block until every job submitted so far has been issued and has run."""
        if self._thread is None:
            return
        future = Future(self._failures, f"what the {self.name} lane was given")
        self.submit(lambda: future.complete(self.device.mark(self.stream, host_waits=True)))
        future.synchronize()

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        with self.device.on(self.stream):
            while (job := self._jobs.get()) is not None:
                self._delay()
                job()
                job = None  # while waiting for the next job, keep nothing of the last one alive
                self._failures.progressed()


HOLDING = "gradient kept"
"""The name of a task that copies or adds a gradient to be held until the step."""
Turn = Literal["next", "later", "last", "spare"]
"""The priority class of a task. "next" runs first, the unit that the next forward needs soonest before the others.
"later" is for tasks that no forward waits for, in the order of backward, and "last" for those that only the last
backward of a step waits for, in that order, too. "spare" is for optional tasks, in the order of "next"."""
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
        return TURNS.index(self.turn), -self.order if self.turn in ("later", "last") else self.order, self.sequence


class UpdateWorker(_Lane):
    """One thread that orders the tasks; the work inside a task is spread over the updater's own threads."""

    def __init__(
        self, device: Device, failures: Failures, meter: LaneMeter, delay: Delay, *, idle: bool = False
    ) -> None:
        """Start the thread. `idle`: the lane gets no tasks, and has no thread."""
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
        super().__init__("update", device, failures, idle=idle)

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

    def end(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _work(self) -> None:
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


@dataclass(frozen=True)
class Lanes:
    """The threads of an engine. `ds_slide.runtime.ended` ends them."""

    h2d: StreamWorker
    outer_h2d: StreamWorker
    """Uploads updated outer modules. In a lane of their own they do not delay the blocks, and the blocks do not delay
    them."""
    d2h: StreamWorker
    update: UpdateWorker
    products: StreamWorker
    """Makes the updates of whole matrices from copies that the update lane has sent up. Idle without such a rule."""
    matrices_d2h: StreamWorker
    """Brings these copies back to host memory, and ends the updates. What comes from the GPU to its update passes
    through `d2h`, which may wait for a buffer that such an update holds."""
