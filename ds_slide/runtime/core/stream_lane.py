"""A lane: a thread that runs jobs in order, on CUDA with a stream of its own."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from ds_slide.report.statistics import LaneMeter
from ds_slide.runtime.core.device import Device, Marker
from ds_slide.runtime.core.futures import THREAD_PREFIX, Failures, Future

Job = Callable[[], None]


class Delay:
    """Random pauses before every job of every lane, for race tests: they must not change a bit of the result."""

    def __init__(self, milliseconds: float, seed: int) -> None:
        self._seconds = milliseconds / 1e3
        self._random = random.Random(seed)

    def __call__(self) -> None:
        if self._seconds > 0.0:
            time.sleep(self._random.uniform(0.0, self._seconds))


class StreamWorker:
    """Runs jobs first in, first out. A job may block its own lane (for a buffer, for an update), never another."""

    def __init__(
        self, name: str, device: Device, failures: Failures, meter: LaneMeter, delay: Delay, *, idle: bool = False
    ) -> None:
        """Start the thread. `idle`: the lane gets no jobs, and has no thread and no stream."""
        self.name = name
        self.device = device
        self.stream: Any = None if idle else device.stream()
        self.meter = meter
        self._failures = failures
        self._delay = delay
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not idle:
            self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}{name}", daemon=True)
            self._thread.start()
            failures.end_idle(self._end)

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
        self.submit(lambda: future.keep(self.device.mark(self.stream, host_waits=True)))
        future.synchronize()

    def close(self) -> None:
        """End the thread after the jobs submitted so far. Each job ends by itself or by a failure. Harmless when called
        twice."""
        self._end()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _end(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        try:
            self.device.enter_thread()
            with self.device.on(self.stream):
                while (job := self._jobs.get()) is not None:
                    self._delay()
                    job()
                    job = None  # while waiting for the next job, keep nothing of the last one alive
                    self._failures.progressed()
        except BaseException as error:
            self._failures.record(self.name, error)
