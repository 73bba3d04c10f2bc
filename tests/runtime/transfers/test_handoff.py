"""Waits end by what they wait for or by a failure, at once, and are known while they last."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from markers import Passing

from ds_slide import _native
from ds_slide.errors import SlideError
from ds_slide.report.statistics import LaneMeter
from ds_slide.runtime.core.device import PASSED, Device, Marker
from ds_slide.runtime.core.futures import Failures, Future
from ds_slide.runtime.core.lanes import Delay, StreamWorker, UpdateWorker
from ds_slide.runtime.core.pool import BufferPool
from ds_slide.runtime.gradients.streamed_gradient import StreamedGradient
from ds_slide.runtime.ssd.buffers import BufferCache

SECONDS = 30.0


class Waiter:
    """`wait` in a thread of its own."""

    def __init__(self, wait: Callable[[], Any], name: str = "waiter") -> None:
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wait = wait
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._ended.put(self._wait())
        except BaseException as error:
            self._ended.put(error)

    def result(self) -> Any:
        return self._ended.get(timeout=SECONDS)


def begun(failures: Failures) -> str:
    """What the one wait that is to begin waits for."""
    deadline = threading.Event()
    while not failures.waits():
        deadline.wait(0.001)
    (wait,) = failures.waits()
    return wait.what


def pool_of(count: int, failures: Failures) -> BufferPool:
    return BufferPool(_native.Pool(1, count, False, False), failures, "buffers for gradients")


@dataclass
class Weights:
    """The source of a cache. `cache`: the cache where a load ends at once, None where it never ends."""

    cache: BufferCache[int] | None = None
    what: str = "weights"

    def load(self, key: int, _buffer: torch.Tensor) -> None:
        if self.cache is not None:
            self.cache.end_load(key)

    def owner(self, key: int) -> str:
        return f"blocks.{key}"


def held(failures: Failures) -> None:
    cache: BufferCache[int] = BufferCache(Weights(), failures, pool=pool_of(1, failures))
    with cache.held(3):
        pass


def forgotten(failures: Failures) -> None:
    weights = Weights()
    cache = weights.cache = BufferCache(weights, failures, pool=pool_of(1, failures))
    cache.take(0, lambda _: None, urgent=True)
    cache.forget([0])


def drained(failures: Failures) -> None:
    lane = UpdateWorker(Device(torch.device("cpu")), failures, LaneMeter(), Delay(0.0, 0))
    blocked = threading.Event()
    lane.submit(0, PASSED, lambda: int(not blocked.wait(2 * SECONDS)))
    try:
        lane.drain()
    finally:
        blocked.set()


def piece(failures: Failures) -> None:
    StreamedGradient(Device(torch.device("cpu")), None, failures)._current()


WAITS: dict[str, tuple[Callable[[Failures], Any], str]] = {
    "future": (lambda failures: Future(failures, "the sunrise").wait(), "the sunrise"),
    "pool": (lambda failures: pool_of(0, failures).lease(), "one of the buffers for gradients"),
    "buffer": (held, "the weights of blocks.3 to be read from SSD"),
    "forget": (forgotten, "the weights to be written to SSD"),
    "drain": (drained, "the updates that are under way"),
    "rows": (piece, "the next rows of a streamed gradient"),
}


@pytest.mark.parametrize("kind", WAITS)
def test_a_failure_ends_every_wait_at_once(kind: str) -> None:
    failures = Failures()
    wait, what = WAITS[kind]
    waiter = Waiter(lambda: wait(failures))
    assert begun(failures) == what
    failures.record("h2d", RuntimeError("the link is gone"))
    error = waiter.result()
    assert isinstance(error, SlideError) and "the h2d lane stopped with RuntimeError: the link is gone" in str(error)
    assert failures.waits() == []


@pytest.mark.parametrize("kind", [kind for kind in WAITS if kind != "drain"])
def test_after_a_failure_nobody_begins_to_wait(kind: str) -> None:
    failures = Failures()
    failures.record("d2h", RuntimeError("full"))
    with pytest.raises(SlideError, match="d2h lane stopped"):
        WAITS[kind][0](failures)


@pytest.mark.parametrize("before", [False, True], ids=["idle", "made after the failure"])
@pytest.mark.parametrize("kind", ["lane", "update lane"])
def test_a_failure_ends_lanes_that_wait_for_work(kind: str, before: bool) -> None:
    failures, device = Failures(), Device(torch.device("cpu"))
    if before:
        failures.end("the engine has ended")
    make = functools.partial(StreamWorker, "h2d") if kind == "lane" else UpdateWorker
    lane = make(device, failures, LaneMeter(), Delay(0.0, 0))
    if not before:
        failures.end("the engine has ended")
    lane._thread.join(SECONDS)
    assert not lane._thread.is_alive()
    lane.close()


def test_a_lane_that_is_closed_runs_all_that_it_was_given() -> None:
    """However long that takes: what a job uses goes after `close`."""
    failures = Failures()
    lane = StreamWorker("h2d", Device(torch.device("cpu")), failures, LaneMeter(), Delay(0.0, 0))
    released, ran = threading.Event(), []
    lane.submit(lambda: ran.append(released.wait(2 * SECONDS)))
    lane.submit(lambda: ran.append("the last"))
    closing = Waiter(lane.close)
    released.set()
    assert closing.result() is None and ran == [True, "the last"]


def test_a_failure_ends_a_lane_that_waits_in_a_job_while_it_is_closed() -> None:
    failures = Failures()
    lane = StreamWorker("h2d", Device(torch.device("cpu")), failures, LaneMeter(), Delay(0.0, 0))
    lane.submit(lambda: Future(failures, "the sunrise").wait() and None)
    closing = Waiter(lane.close)
    assert begun(failures) == "the sunrise"
    failures.end("the sun is gone")
    assert closing.result() is None
    assert not lane._thread.is_alive()


def test_the_first_failure_is_everyones_with_its_cause() -> None:
    failures = Failures()
    failures.raise_first()
    cause = OSError("first")
    failures.record("ssd", cause)
    failures.end("second")
    for _ in range(2):
        with pytest.raises(SlideError, match="OSError: first") as raised:
            failures.raise_first()
        assert raised.value.__cause__ is cause


def test_a_future_that_was_kept_serves_also_after_a_failure() -> None:
    failures = Failures()
    future, marker = Future(failures), Marker()
    future.complete(marker)
    failures.record("h2d", RuntimeError("later"))
    assert future.wait() is marker and future.is_complete


def test_whoever_waits_for_a_future_presses_it_first_and_only_if_it_has_to_wait() -> None:
    failures = Failures()
    pressed: list[int] = []
    work = SimpleNamespace(press=lambda: pressed.append(len(failures.waits())))
    future = Future(failures, "it", work)
    waiter = Waiter(future.wait)
    begun(failures)
    assert pressed == [0] and not future.is_complete
    future.complete(marker := Marker())
    assert waiter.result() is future.wait() is marker
    assert pressed == [0]
    assert Future.completed(failures).wait() is PASSED


def test_waits_are_told_apart_by_who_waits() -> None:
    failures = Failures()
    future = Future(failures, "the same")
    waiters = [Waiter(future.wait, name) for name in ("MainThread", "ds_slide-h2d")]
    deadline = threading.Event()
    while len(failures.waits()) < 2:
        deadline.wait(0.001)
    assert {wait.thread: wait.of_client for wait in failures.waits()} == {"MainThread": True, "ds_slide-h2d": False}
    before = failures.progress
    future.complete()
    for waiter in waiters:
        waiter.result()
    assert failures.progress > before


def test_a_collective_that_fails_is_named_with_what_to_look_for() -> None:
    failures = Failures()
    with pytest.raises(
        SlideError, match=r"collective 7 \(the norm\) failed: mostly because another rank has ended: reset by peer"
    ):
        with failures.collective("collective 7 (the norm)"):
            raise RuntimeError("reset by peer")


def test_collectives_on_the_gpu_are_known_until_they_have_run() -> None:
    failures = Failures()
    ends = [Passing(), Passing()]
    for number, end in enumerate(ends):
        failures.outstanding(f"collective {number}", end)
    assert failures.oldest_outstanding() == "collective 0"
    before = failures.progress
    ends[0].passed = True
    assert failures.oldest_outstanding() == "collective 1" and failures.progress > before
    ends[1].passed = True
    assert failures.oldest_outstanding() is None
