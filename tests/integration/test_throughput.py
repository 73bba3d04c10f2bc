"""DeepSpeed's samples per second come from events of the GPU; the host waits only where they are logged."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from deepspeed.utils.timer import ThroughputTimer

from ds_slide.integration.throughput import EventTimer

BATCH, EACH, LATENCY = 12, 2.0, 5
"""Samples of a step; seconds that the GPU takes for a micro-batch; events that the GPU is behind the host."""


class Gpu:
    """A stream that runs `LATENCY` events behind the host. The CPU has no events, so this takes a GPU's place."""

    def __init__(self) -> None:
        self.time = 0.0
        self.recorded: list[Event] = []
        self.made = self.waits = 0

    def event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at = self.gpu.time
        self.gpu.recorded = [*(each for each in self.gpu.recorded if each is not self), self]

    def query(self) -> bool:
        return self not in self.gpu.recorded[-LATENCY:]

    def synchronize(self) -> None:
        self.gpu.waits += 1
        self.gpu.recorded.clear()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def timer(gpu: Gpu, every: int, said: list[str]) -> EventTimer:
    stock = ThroughputTimer(DeepSpeedThroughputTimerConfig(), BATCH, steps_per_output=every, logging_fn=said.append)
    return EventTimer(stock, gpu.event)


def train(it: EventTimer, gpu: Gpu, steps: int, accumulation: int = 3) -> None:
    for _ in range(steps):
        for micro_batch in range(accumulation):
            it.start()
            gpu.time += EACH
            it.stop(global_step=micro_batch == accumulation - 1, report_speed=True)
            gpu.time += 1.0  # between stop() and start(), which does not count


def test_the_log_has_the_gpu_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: pytest.fail("waits for the GPU"))
    gpu, said = Gpu(), list[str]()
    it = timer(gpu, 4, said)
    train(it, gpu, 8)
    rate = BATCH / (3 * EACH)
    assert len(said) == 2
    for line, step in zip(said, (4, 8), strict=True):
        words: Any = dict(word.strip(",").split("=") for word in line.split("/")[-1].split())
        assert int(words["global_step"]) == step
        assert float(words["CurrSamplesPerSec"]) == pytest.approx(rate, rel=0.01)
        assert float(words["RunningAvgSamplesPerSec"]) == pytest.approx(rate, rel=0.01)


def test_the_host_waits_only_where_steps_are_logged() -> None:
    gpu, said = Gpu(), list[str]()
    it = timer(gpu, 50, said)
    train(it, gpu, 49)
    assert gpu.waits == 0
    train(it, gpu, 1)
    assert gpu.waits > 0


def test_events_are_used_again() -> None:
    gpu = Gpu()
    it = timer(gpu, 10**9, [])
    train(it, gpu, 100)
    assert gpu.made <= LATENCY + 3


def test_the_average_can_be_asked_for_at_any_time() -> None:
    gpu = Gpu()
    it = timer(gpu, 10**9, [])
    train(it, gpu, 9)
    assert it.avg_samples_per_sec() == pytest.approx(BATCH / (3 * EACH), rel=0.01)
