"""The cache of host buffers in front of the SSD: who gets which buffer when, and that nobody waits in a circle."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from ds_slide.errors import SlideError
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.pool import BufferPool
from ds_slide.runtime.ssd.buffers import BufferCache

SECONDS = 30.0


class Disk:
    """The source of a cache. It holds one number per key. Reads and writes end when the test says so, or at once in
    another thread."""

    what = "numbers"
    cache: BufferCache[int]

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self.reads: list[int] = []
        self.pending: queue.SimpleQueue[tuple[int, Callable[[], None]]] = queue.SimpleQueue()

    def owner(self, key: int) -> str:
        return str(key)

    def load(self, key: int, buffer: torch.Tensor) -> None:
        self.reads.append(key)

        def arrive() -> None:
            buffer.fill_(self.values.get(key, float(key)))
            self.cache.end_load(key)

        self.pending.put((key, arrive))

    def finish(self, count: int = 1) -> list[int]:
        done = []
        for _ in range(count):
            key, arrive = self.pending.get(timeout=SECONDS)
            done.append(key)
            arrive()
        return done

    def finish_all(self) -> None:
        while not self.pending.empty():
            self.finish()


@dataclass(eq=False)
class Update:
    """An update that takes buffers."""

    is_pressed: bool = False


MakePool = Callable[[int], BufferPool]
Made = tuple[BufferCache[int], Disk]


@pytest.fixture
def cache_of(make_pool: MakePool, failures: Failures) -> Callable[[int], Made]:
    def make(count: int) -> Made:
        disk = Disk()
        disk.cache = BufferCache(disk, failures, pool=make_pool(count))
        return disk.cache, disk

    return make


def test_uses_come_in_the_order_of_the_takes(cache_of: Callable[[int], Made]) -> None:
    cache, disk = cache_of(2)
    used: list[int] = []
    for key in range(5):
        cache.take(key, lambda _, key=key: used.append(key), urgent=True)  # type: ignore[misc]
    for key in range(5):
        disk.finish()
        assert used == list(range(key + 1))
        cache.release(key)
    assert disk.reads == [0, 1, 2, 3, 4]


def test_reading_ahead_never_displaces_what_comes_sooner(cache_of: Callable[[int], Made]) -> None:
    cache, disk = cache_of(2)
    cache.expect([3, 1, 4])
    disk.finish_all()
    assert disk.reads == [3, 1]
    used: list[float] = []
    cache.take(3, lambda buffer: used.append(float(buffer)), urgent=True)
    assert used == [3.0] and disk.reads == [3, 1]
    cache.release(3)
    disk.finish_all()
    assert disk.reads == [3, 1, 4]  # the one that was used made room


def test_a_demand_waits_rather_than_displace_what_is_needed_sooner(cache_of: Callable[[int], Made]) -> None:
    cache, disk = cache_of(2)
    cache.expect([0, 1, 2])
    disk.finish_all()
    used: list[int] = []
    cache.take(2, lambda _: used.append(2), urgent=False)
    assert disk.reads == [0, 1]
    with cache.held(0):  # the GPU has had it: it is no longer among the next
        pass
    disk.finish_all()
    assert used == [2] and disk.reads == [0, 1, 2]


def test_who_waits_for_a_demand_presses_it_before_what_is_needed_sooner(cache_of: Callable[[int], Made]) -> None:
    """The GPU may be the one that waits: then it never comes to what is needed sooner."""
    cache, disk = cache_of(2)
    cache.expect([0, 1])
    disk.finish_all()
    used: list[int] = []
    cache.take(2, lambda _: used.append(2), urgent=False)
    cache.take(3, lambda _: used.append(3), urgent=False)
    assert disk.reads == [0, 1]
    cache.press(3)
    disk.finish_all()
    assert used == [3] and disk.reads == [0, 1, 3]  # in the place of what is needed last; 2 still waits
    cache.press(7)  # nobody has asked for it
    assert disk.pending.empty()


def test_a_demand_that_was_pressed_before_it_came_is_urgent(cache_of: Callable[[int], Made]) -> None:
    cache, disk = cache_of(1)
    cache.expect([0])
    disk.finish_all()
    used: list[int] = []
    cache.take(2, lambda _: used.append(2), urgent=False, update=Update(is_pressed=True))
    disk.finish_all()
    assert used == [2]


def test_in_a_hurry_a_demand_displaces_any_clean_entry(cache_of: Callable[[int], Made]) -> None:
    cache, disk = cache_of(1)
    cache.expect([0, 1])
    disk.finish_all()
    used: list[int] = []
    cache.take(1, lambda _: used.append(1), urgent=False)
    assert disk.reads == [0]
    with cache.hurry():
        disk.finish_all()
        assert used == [1]


def test_reserved_entries_stay(cache_of: Callable[[int], Made]) -> None:
    cache, disk = cache_of(2)
    cache.reserve(0, 1)
    cache.expect([0, 1])
    disk.finish_all()
    used: list[int] = []
    cache.take(7, lambda _: used.append(7), urgent=True)
    disk.finish_all()
    assert disk.reads == [0, 1, 7] and used == [7]
    cache.take(0, lambda _: used.append(0), urgent=False, update=Update(), reserved=True)
    assert used == [7, 0]


def test_an_update_waits_for_the_write_of_the_one_before(cache_of: Callable[[int], Made]) -> None:
    cache, disk = cache_of(1)
    used: list[str] = []
    one, other = Update(), Update()
    cache.take(0, lambda _: used.append("first"), urgent=True, update=one)
    disk.finish_all()
    cache.begin_write(0)
    cache.release(0)
    cache.take(0, lambda _: used.append("same"), urgent=True, update=one)
    cache.take(0, lambda _: used.append("next"), urgent=True, update=other)
    assert used == ["first", "same"]
    cache.begin_write(0)
    cache.release(0)
    cache.end_write(0)
    assert used == ["first", "same"]
    cache.end_write(0)
    assert used == ["first", "same", "next"]


def test_an_update_waits_for_the_one_before_also_until_its_write_has_begun(cache_of: Callable[[int], Made]) -> None:
    cache, disk = cache_of(1)
    used: list[str] = []
    one, other = Update(), Update()
    for name, update in (("first", one), ("same", one), ("next", other)):
        cache.take(0, lambda _, name=name: used.append(name), urgent=True, update=update)  # type: ignore[misc]
    disk.finish_all()
    assert used == ["first", "same"]
    for _ in range(2):
        assert used == ["first", "same"]
        cache.begin_write(0)
        cache.release(0)
        cache.end_write(0)
    assert used == ["first", "same", "next"]


def test_what_is_forgotten_is_not_read_ahead_before_it_is_taken(make_pool: MakePool, failures: Failures) -> None:
    """Between `settle` and the next update somebody may write the file: a record read before that is an old one."""
    disk = Disk()
    cache = disk.cache = BufferCache(disk, failures, range(4), make_pool(1))
    cache.take(3, lambda _: None, urgent=True)
    cache.forget([0, 1])
    disk.finish_all()
    cache.release(3)
    cache.read_ahead()
    disk.finish_all()
    assert disk.reads == [3, 2]
    cache.take(0, lambda _: None, urgent=True)
    disk.finish_all()
    assert disk.reads == [3, 2, 0]


def test_a_buffer_that_is_freed_by_forgetting_goes_to_who_waits_for_it(cache_of: Callable[[int], Made]) -> None:
    cache, disk = cache_of(1)
    cache.expect([0])
    disk.finish_all()
    used: list[int] = []
    cache.take(1, lambda _: used.append(1), urgent=False)
    assert disk.reads == [0]
    cache.forget([0])
    disk.finish_all()
    assert used == [1]


def test_an_abandoned_cache_starts_nothing(cache_of: Callable[[int], Made]) -> None:
    """Whatever still ends or asks while the runtime closes: the store may be closed already."""
    cache, disk = cache_of(1)
    used: list[int] = []
    cache.take(0, lambda _: used.append(0), urgent=True)
    cache.abandon()
    disk.finish_all()
    cache.expect([1])
    cache.take(2, lambda _: used.append(2), urgent=True)
    with cache.hurry():
        pass
    assert disk.reads == [0] and used == []


def test_forget_waits_for_users_and_reads_again(cache_of: Callable[[int], Made]) -> None:
    cache, disk = cache_of(2)
    cache.take(0, lambda _: None, urgent=True)
    disk.finish_all()
    forgotten = threading.Event()

    def forget() -> None:
        cache.forget([0])
        forgotten.set()

    threading.Thread(target=forget, daemon=True).start()
    assert not forgotten.wait(0.2)
    cache.release(0)
    assert forgotten.wait(SECONDS)
    disk.values[0] = 42.0
    seen: list[float] = []
    cache.take(0, lambda buffer: seen.append(float(buffer)), urgent=True)
    disk.finish_all()
    assert seen == [42.0]


def test_a_waiting_thread_raises_when_the_disk_has_failed(cache_of: Callable[[int], Made], failures: Failures) -> None:
    cache, _ = cache_of(1)
    failures.record("ssd", OSError("input/output error"))
    with pytest.raises(SlideError, match="the ssd lane stopped with OSError"), cache.held(0):
        pass


@pytest.fixture
def busy_disk(make_pool: MakePool, failures: Failures) -> Iterator[Callable[[int], Made]]:
    """Ends reads in another thread, in any order."""
    stop = threading.Event()
    threads = []

    def make(count: int) -> Made:
        disk = Disk()

        def run() -> None:
            shuffle = random.Random(0)
            waiting: list[Callable[[], None]] = []
            while not stop.is_set():
                try:
                    waiting.append(disk.pending.get(timeout=0.001 if waiting else 0.05)[1])
                except queue.Empty:
                    if not waiting:
                        continue
                if len(waiting) > 2 or disk.pending.empty():
                    waiting.pop(shuffle.randrange(len(waiting)))()

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        disk.cache = BufferCache(disk, failures, pool=make_pool(count))
        return disk.cache, disk

    yield make
    stop.set()
    for thread in threads:
        thread.join(SECONDS)


@pytest.mark.parametrize("buffers", [1, 2, 3, 8])
def test_every_update_is_applied_once_in_order_whatever_the_timing(
    busy_disk: Callable[[int], Made], buffers: int
) -> None:
    """Updates write back asynchronously, readers come in between: at the end every key has seen every step."""
    cache, disk = busy_disk(buffers)
    keys, steps = range(6), 40
    done = threading.Semaphore(0)
    writes: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()

    def write() -> None:
        while (item := writes.get()) is not None:
            disk.values[item[0]] = item[1]
            cache.end_write(item[0])
            done.release()

    writer = threading.Thread(target=write)
    writer.start()
    for step in range(steps):
        cache.expect(keys)
        of_step = Update()
        for key in keys:

            def update(buffer: torch.Tensor, key: int = key, step: int = step) -> None:
                assert float(buffer) == key + step, "an update was lost or came twice"
                buffer += 1
                cache.begin_write(key)
                cache.release(key)
                writes.put((key, float(buffer)))

            cache.take(key, update, urgent=step % 2 == 0, update=of_step)
        if step % 3 == 0:
            with cache.hurry(), cache.held(step % len(keys)) as buffer:
                assert float(buffer) >= 0.0
        for _ in keys:
            assert done.acquire(timeout=SECONDS), "a take was never served"
    writes.put(None)
    writer.join(SECONDS)
    assert [disk.values[key] for key in keys] == [float(key + steps) for key in keys]
