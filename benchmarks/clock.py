"""Times of the phases of a training step without stopping the GPU."""

from __future__ import annotations

import time

import torch


class PhaseClock:
    """Collects named marks and adds up, per phase, the time since the mark before.

    On the GPU a mark is an event on the current stream: some microseconds of the host, and nobody waits for it.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._names: list[str | None] = []
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def start(self) -> None:
        """Open a step; what lies between two steps belongs to no phase."""
        self._record(None)

    def end_of(self, phase: str) -> None:
        self._record(phase)

    def phases(self) -> list[dict[str, float]]:
        """Seconds of every phase, one dict per step in order; call it after a synchronize."""
        steps: list[dict[str, float]] = []
        for position, phase in enumerate(self._names):
            if phase is None:
                steps.append({})
            else:
                steps[-1][phase] = steps[-1].get(phase, 0.0) + self._seconds_before(position)
        return steps

    def _record(self, name: str | None) -> None:
        self._names.append(name)
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def _seconds_before(self, position: int) -> float:
        if self._on_gpu:
            return self._events[position - 1].elapsed_time(self._events[position]) / 1e3
        return self._times[position] - self._times[position - 1]
