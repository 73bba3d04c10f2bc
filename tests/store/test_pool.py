"""The pool: a fixed number of buffers, never lost and never lent twice. Waiting for one: `tests/runtime/transfers`."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ds_slide import _native

BYTES = 8192


def start(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("huge_pages", [False, True])
def test_buffers_are_apart_aligned_and_writable(huge_pages):
    pool = _native.Pool(BYTES + 100, 3, False, huge_pages)
    leases = [pool.try_lease() for _ in range(3)]
    arrays = [np.frombuffer(lease.memory, np.uint8) for lease in leases]
    for index, (lease, array) in enumerate(zip(leases, arrays, strict=True)):
        assert (lease.nbytes, array.size, array.ctypes.data) == (BYTES + 100, BYTES + 100, lease.ptr)
        assert lease.ptr % (2 << 20 if huge_pages else 4096) == 0
        array[:] = index
    assert [set(array) for array in arrays] == [{0}, {1}, {2}]
    assert {lease.ptr for lease in leases} == {*pool.addresses} and pool.buffer_bytes == BYTES + 100
    assert pool.try_lease() is None


def test_statistics_follow_the_leases():
    pool = _native.Pool(BYTES, 3, False, False)
    first, second = pool.try_lease(), pool.try_lease()
    assert pool.stats() == {"buffers": 3, "free": 1, "leased_peak": 2, "bytes": 3 * BYTES, "pinned": False}
    first.release()
    second.release()
    assert (pool.stats()["free"], pool.stats()["leased_peak"]) == (3, 2)


def test_release_may_be_repeated_and_never_returns_the_next_users_buffer():
    pool = _native.Pool(BYTES, 1, False, False)
    stale = pool.try_lease()
    stale.release()
    current = pool.try_lease()
    stale.release()
    assert pool.try_lease() is None
    with pytest.raises(ValueError, match="released"):
        stale.ptr  # noqa: B018
    with pytest.raises(ValueError, match="released"):
        stale.memory  # noqa: B018
    assert current.ptr


def test_a_dropped_lease_goes_back_only_after_its_last_view():
    pool = _native.Pool(BYTES, 1, False, False)
    tensor = torch.frombuffer(pool.try_lease().memory, dtype=torch.float32)
    part = tensor[5:]
    del tensor
    gc.collect()
    assert pool.try_lease() is None
    del part
    gc.collect()
    assert pool.try_lease() is not None


def test_many_threads_share_few_buffers():
    pool = _native.Pool(BYTES, 3, False, False)
    damaged = []

    def use(value: int) -> None:
        for round_ in range(150):
            if (lease := pool.try_lease()) is None:
                continue
            array = np.frombuffer(lease.memory, np.uint8)
            array[:] = value
            if not (array == value).all():
                damaged.append(value)
            del array
            if round_ % 2:
                lease.release()
            del lease

    threads = [start(lambda value=value: use(value)) for value in range(12)]
    for thread in threads:
        thread.join()
    assert not damaged
    assert pool.stats()["free"] == 3
    assert pool.stats()["leased_peak"] <= 3


def test_what_is_lent_at_the_close_is_freed_when_it_comes_back():
    pool = _native.Pool(BYTES, 2, False, False)
    lent, other = pool.try_lease(), pool.try_lease()
    array = np.frombuffer(lent.memory, np.uint8)
    other.release()
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="Pool is closed"):
        pool.try_lease()
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
    lease = pool.try_lease()
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
    with pytest.raises(ValueError, match="at least one byte"):
        _native.Pool(0, 1, False, False)
    assert _native.Pool(0, 0, False, False).try_lease() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a driver page-locking works")
def test_page_locking_without_a_driver_is_an_error():
    with pytest.raises(RuntimeError, match=r"buffer 1 of 1 .*cannot page-lock 8192 bytes"):
        _native.Pool(BYTES, 1, True, False)


def test_a_forked_child_neither_uses_nor_damages_the_pool():
    pool = _native.Pool(BYTES, 2, False, False)
    lease = pool.try_lease()
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
    np.frombuffer(lease.memory, np.uint8)[:] = 1
