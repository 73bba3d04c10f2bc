"""Samples per second, as DeepSpeed logs them, without a wait for the GPU at each micro-batch.

DeepSpeed's timer waits for the GPU when a forward begins and when a step ends, unless the JSON says
`"timers": {"throughput": {"synchronized": false}}`. The host then cannot launch a micro-batch before the GPU has ended
the last one: 13 of 99 ms of a micro-batch of 1 x 2048 tokens were idle for a 3 B model on an H100. Events of the GPU
give the same times. They are read once the GPU has passed them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.timer import ThroughputTimer


def measure_by_events(engine: Any) -> None:
    """Replace the engine's throughput timer, unless the JSON asks for its waits or the accelerator has no events."""
    make_event = get_accelerator().Event
    if make_event is not None and "synchronized" not in engine._config.timers_config.model_fields_set:
        engine.tput_timer = timer = EventTimer(engine.tput_timer, lambda: make_event(enable_timing=True))
        if engine.training_dataloader is not None:
            engine.training_dataloader.tput_timer = timer


class EventTimer(ThroughputTimer):
    """A throughput timer whose times are those between events."""

    def __init__(self, stock: ThroughputTimer, make_event: Callable[[], Any]) -> None:
        super().__init__(
            stock.config.model_copy(update={"synchronized": False}), stock.batch_size, stock.start_step,
            stock.steps_per_output, stock.monitor_memory, stock.logging,
        )  # fmt: skip
        self._make_event = make_event
        self._free: list[Any] = []
        self._begin: Any = None
        self._measured: deque[tuple[int, Any, Any]] = deque()
        """Steps with their events whose times have not been read."""
        self._of_step = 0.0
        """Seconds of the latest step that have been read."""

    def start(self) -> None:
        super().start()
        if self.started and self.global_step_count >= self.start_step:
            self._begin = self._mark()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        if self._begin is not None:
            step, logged = self.global_step_count, self.steps_per_output
            self._measured.append((step, self._begin, self._mark()))
            self._begin = None
            self._read(wait=bool(global_step and report_speed and logged and (step + 1) % logged == 0))
            # DeepSpeed's method adds the time since `start_time`, logs and restarts the count of the step.
            self.step_elapsed_time, self.start_time = self._of_step, time.time()
            self._of_step = 0.0 if global_step else self._of_step
        super().stop(global_step, report_speed)

    def avg_samples_per_sec(self) -> float:
        self._read(wait=True)
        return float(super().avg_samples_per_sec())

    def _mark(self) -> Any:
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def _read(self, wait: bool) -> None:
        """Add the times that the GPU has passed. `wait`: all times."""
        while self._measured:
            step, begin, end = self._measured[0]
            if wait:
                end.synchronize()
            elif not end.query():
                return
            self._measured.popleft()
            seconds = begin.elapsed_time(end) / 1e3
            self.total_elapsed_time += seconds
            self._of_step += seconds if step == self.global_step_count else 0.0
            self._free += (begin, end)
