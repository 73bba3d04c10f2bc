"""Leases of host buffers: who waits for one gets it in turn, and nobody waits in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ds_slide.errors import SlideError
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.pool import BufferPool

SECONDS = 30.0
MakePool = Callable[[int], BufferPool]


def start(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def until_they_wait(failures: Failures, count: int) -> None:
    pause = threading.Event()
    while len(failures.waits()) < count:
        pause.wait(0.001)


def test_a_lease_is_one_buffer_until_it_is_released(make_pool: MakePool) -> None:
    pool = make_pool(2)
    first, second = pool.lease(), pool.lease()
    assert {first.buffer.data_ptr(), second.buffer.data_ptr()} == {*pool.addresses}
    assert pool.try_lease() is None
    first.release()
    assert pool.lease().buffer.data_ptr() == first.buffer.data_ptr()
    statistics = pool.statistics()
    assert (statistics["buffers"], statistics["leased_peak"], statistics["waits"]) == (2, 2, 0)


def test_threads_are_served_in_the_order_in_which_they_came(make_pool: MakePool, failures: Failures) -> None:
    pool, order = make_pool(1), []
    held = pool.lease()

    def wait_and_note(number: int) -> None:
        lease = pool.lease()
        order.append(number)
        lease.release()

    threads = []
    for number in range(6):
        threads.append(start(lambda number=number: wait_and_note(number)))  # type: ignore[misc]
        until_they_wait(failures, len(threads))
    held.release()
    for thread in threads:
        thread.join(SECONDS)
    assert order == list(range(6))
    statistics = pool.statistics()
    assert statistics["waits"] == 6 and statistics["waited_s"] > 0.0


def test_who_comes_later_does_not_overtake_a_thread_that_waits(make_pool: MakePool, failures: Failures) -> None:
    """Even before that thread runs."""
    for _ in range(50):
        pool, got = make_pool(1), []
        held = pool.lease()
        thread = start(lambda pool=pool, got=got: got.append(pool.lease()))  # type: ignore[misc]
        until_they_wait(failures, 1)
        held.release()
        overtaken = pool.try_lease()
        thread.join(SECONDS)
        assert got and overtaken is None


def test_a_thread_that_a_failure_has_woken_is_not_served(make_pool: MakePool, failures: Failures) -> None:
    pool, errors = make_pool(1), []
    held = pool.lease()

    def wait() -> None:
        with pytest.raises(SlideError) as raised:
            pool.lease()
        errors.append(str(raised.value))

    threads = [start(wait) for _ in range(3)]
    until_they_wait(failures, 3)
    failures.record("update", RuntimeError("no such number"))
    for thread in threads:
        thread.join(SECONDS)
    assert len(errors) == 3 and all("the update lane stopped" in error for error in errors)
    held.release()
    assert pool.try_lease() is not None
