"""The pool: a fixed number of buffers, lent out fairly, never lost and never lent twice."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ds_slide import _native

BYTES = 8192
LONG_S = 60.0


def until(condition: Callable[[], bool], pause: threading.Event) -> None:
    """Return once `condition` holds; other threads get the processor meanwhile."""
    for _ in range(60_000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("nothing happened within a minute")


def start(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("huge_pages", [False, True])
def test_buffers_are_apart_aligned_and_writable(huge_pages):
    pool = _native.Pool(BYTES + 100, 3, False, huge_pages)
    leases = [pool.lease(0) for _ in range(3)]
    arrays = [np.frombuffer(lease, np.uint8) for lease in leases]
    for index, (lease, array) in enumerate(zip(leases, arrays, strict=True)):
        assert (lease.nbytes, array.size, array.ctypes.data) == (BYTES + 100, BYTES + 100, lease.ptr)
        assert lease.ptr % (2 << 20 if huge_pages else 4096) == 0
        array[:] = index
    assert [set(array) for array in arrays] == [{0}, {1}, {2}]


def test_an_empty_pool_says_so_without_waiting_or_after_the_time_given():
    pool = _native.Pool(BYTES, 1, False, False)
    lease = pool.lease(0)
    assert pool.try_lease() is None
    assert pool.stats()["waits"] == 0
    assert pool.lease(0.02) is None
    statistics = pool.stats()
    assert statistics["waits"] == 1
    assert 0.02 <= statistics["waited_s"] < 10
    lease.release()
    assert pool.try_lease() is not None


def test_statistics_follow_the_leases():
    pool = _native.Pool(BYTES, 3, False, False)
    first, second = pool.lease(0), pool.lease(0)
    assert pool.stats() == {
        "buffers": 3,
        "free": 1,
        "leased_peak": 2,
        "waits": 0,
        "waited_s": 0.0,
        "bytes": 3 * BYTES,
        "pinned": False,
    }
    first.release()
    second.release()
    assert (pool.stats()["free"], pool.stats()["leased_peak"]) == (3, 2)


def test_release_may_be_repeated_and_never_returns_the_next_users_buffer():
    pool = _native.Pool(BYTES, 1, False, False)
    stale = pool.lease(0)
    stale.release()
    current = pool.lease(0)
    stale.release()
    assert pool.try_lease() is None
    with pytest.raises(ValueError, match="released"):
        stale.ptr  # noqa: B018
    with pytest.raises((BufferError, ValueError)):  # which of them depends on the version of pybind11
        memoryview(stale)
    assert current.ptr


def test_a_dropped_lease_goes_back_only_after_its_last_view():
    pool = _native.Pool(BYTES, 1, False, False)
    tensor = torch.frombuffer(pool.lease(0), dtype=torch.float32)
    part = tensor[5:]
    del tensor
    gc.collect()
    assert pool.try_lease() is None
    del part
    gc.collect()
    assert pool.try_lease() is not None


def test_waiting_threads_are_served_in_the_order_they_came():
    pool = _native.Pool(BYTES, 1, False, False)
    held, pause, order = pool.lease(0), threading.Event(), []

    def wait_and_note(number: int) -> None:
        lease = pool.lease(LONG_S)
        order.append(number)
        lease.release()

    threads = []
    for number in range(6):
        threads.append(start(lambda number=number: wait_and_note(number)))
        until(lambda: pool.stats()["waits"] == len(threads), pause)
    held.release()
    for thread in threads:
        thread.join(LONG_S)
    assert order == list(range(6))


def test_who_comes_later_cannot_overtake_a_waiting_thread():
    """The buffer is handed over at release: even before the waiting thread runs, nobody else can take it."""
    for _ in range(50):
        pool = _native.Pool(BYTES, 1, False, False)
        held, pause, got = pool.lease(0), threading.Event(), []
        thread = start(lambda pool=pool, got=got: got.append(pool.lease(LONG_S)))
        until(lambda pool=pool: pool.stats()["waits"] == 1, pause)
        held.release()
        overtaken = pool.try_lease()
        thread.join(LONG_S)
        assert overtaken is None
        assert got[0] is not None


def test_a_thread_that_gave_up_is_not_served():
    pool = _native.Pool(BYTES, 1, False, False)
    held = pool.lease(0)
    assert pool.lease(0.001) is None
    held.release()
    assert pool.try_lease() is not None


def test_many_threads_share_few_buffers():
    pool = _native.Pool(BYTES, 3, False, False)
    damaged = []

    def use(value: int) -> None:
        for round_ in range(150):
            lease = pool.lease(LONG_S) if round_ % 3 else pool.try_lease()
            if lease is None:
                continue
            array = np.frombuffer(lease, np.uint8)
            array[:] = value
            if not (array == value).all():
                damaged.append(value)
            del array
            if round_ % 2:
                lease.release()
            del lease  # else the thread holds one buffer while it waits for the next

    threads = [start(lambda value=value: use(value)) for value in range(12)]
    for thread in threads:
        thread.join(LONG_S)
    assert not damaged
    assert pool.stats()["free"] == 3
    assert pool.stats()["leased_peak"] <= 3


def test_other_python_threads_run_while_one_waits():
    pool = _native.Pool(BYTES, 1, False, False)
    held = pool.lease(0)
    release = start(held.release)  # cannot run if lease() keeps the interpreter lock
    assert pool.lease(LONG_S) is not None
    release.join(LONG_S)


def test_close_ends_waits_with_an_error_and_keeps_what_is_lent():
    pool = _native.Pool(BYTES, 2, False, False)
    lent, other, errors = pool.lease(0), pool.lease(0), []
    array = np.frombuffer(lent, np.uint8)

    def wait() -> None:
        try:
            pool.lease(LONG_S)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [start(wait) for _ in range(3)]
    until(lambda: pool.stats()["waits"] == 3, threading.Event())
    pool.close()
    pool.close()
    for thread in threads:
        thread.join(LONG_S)
    assert errors == ["this Pool was closed while a thread waited for a buffer"] * 3
    other.release()
    for call in (lambda: pool.lease(0), pool.try_lease):
        with pytest.raises(RuntimeError, match="Pool is closed"):
            call()
    array[:] = 3
    assert pool.stats()["bytes"] == BYTES
    del array
    lent.release()
    assert pool.stats()["bytes"] == 0


def test_memory_is_freed_when_pool_and_leases_are_gone():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    pool = _native.Pool(16 << 20, 4, False, False)
    lease = pool.lease(0)
    assert resident() - before >= 63 << 20, "all pages are there at once"
    del pool
    gc.collect()
    assert resident() - before <= 20 << 20
    del lease
    gc.collect()
    assert resident() - before <= 4 << 20


def test_what_does_not_fit_is_refused_with_the_bytes():
    with pytest.raises(RuntimeError, match=rf"host tier: buffer 1 of 2 of a pool of {1 << 62}-byte.*lower the host"):
        _native.Pool(1 << 62, 2, False, False)
    for nbytes, count in itertools.product([0, BYTES], [0, 1]):
        if not (nbytes and count):
            with pytest.raises(ValueError, match="at least one"):
                _native.Pool(nbytes, count, False, False)
    for timeout in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="cannot wait"):
            _native.Pool(BYTES, 1, False, False).lease(timeout)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a driver page-locking works")
def test_page_locking_without_a_driver_is_an_error():
    with pytest.raises(RuntimeError, match=r"buffer 1 of 1 .*cannot page-lock 8192 bytes"):
        _native.Pool(BYTES, 1, True, False)


def test_a_forked_child_neither_uses_nor_damages_the_pool():
    pool = _native.Pool(BYTES, 2, False, False)
    lease = pool.lease(0)
    child = os.fork()
    if child == 0:
        try:
            pool.try_lease()
        except RuntimeError as error:
            refused = "before a fork" in str(error)
            lease.release()
            pool.close()
            os._exit(0 if refused else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.stats()["free"] == 1
    np.frombuffer(lease, np.uint8)[:] = 1
