"""Host memory: slabs, pools of equal buffers, and counters that processes share."""

from __future__ import annotations

import ctypes
from typing import Any, Literal

from ds_slide._native.library import checked, function, new_handle

_slab_new = function("slab_new", "q:pqqqp")
_slab_close = function("slab_close", "q:p")
_slab_data = function("slab_data", "p:p", keeps_gil=True)
_slab_pinned = function("slab_pinned", "q:p", keeps_gil=True)


def _memory(owner: Any, address: int, nbytes: int) -> memoryview:
    """Return a writable view of bytes that keeps `owner` alive."""
    array = (ctypes.c_uint8 * nbytes).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]  # as on every object of Python
    return memoryview(array).cast("B")


class Slab:
    """Host memory of ``nbytes`` bytes, page aligned, mapped in whole pages, not inherited by fork: zero-filled and its
    own, or with ``place``, a descriptor and an offset (whole pages), the bytes from there on of that memory file,
    shared with all who map it.

    The file must be long enough (ValueError), and its descriptor may be closed afterwards.
    ``pin`` page-locks it through the CUDA driver, usable from every context; RuntimeError when that fails.
    ``torch.frombuffer(slab.memory, dtype=torch.uint8)`` shares the memory and keeps the slab alive.
    """

    def __init__(self, nbytes: int, pin: bool, huge_pages: bool, place: tuple[int, int] | None = None) -> None:
        self._handle = new_handle("slab")
        self.nbytes = nbytes
        """The size asked for, in bytes."""
        where = None if place is None else (ctypes.c_int64 * 2)(*place)
        checked(_slab_new(ctypes.byref(self._handle), nbytes, pin, huge_pages, where))

    @property
    def ptr(self) -> int:
        """Address of the first byte; 0 when closed or when ``nbytes`` is 0."""
        return _slab_data(self._handle) or 0

    @property
    def pinned(self) -> bool:
        return bool(_slab_pinned(self._handle))

    @property
    def memory(self) -> memoryview:
        """The bytes, writable. ValueError when closed."""
        address = self.ptr
        if not address and self.nbytes:
            raise ValueError("this Slab is closed")
        return _memory(self, address, self.nbytes)

    def close(self) -> None:
        """Unlock and unmap; tensors that still view the memory must not be used again. A second call does nothing."""
        checked(_slab_close(self._handle))


# ----------------------------------------------------------------------------------------------------------------------
# Leases come and go with the GIL held: they take less time than releasing it.

_pool_new = function("pool_new", "q:pqqqq")
_pool_close = function("pool_close", "q:p")
_pool_try_lease = function("pool_try_lease", "q:pp", keeps_gil=True)
_pool_addresses = function("pool_addresses", "q:ppq", keeps_gil=True)
_pool_stats = function("pool_stats", "q:pp", keeps_gil=True)
_lease_data = function("lease_data", "p:p", keeps_gil=True)
_lease_release = function("lease_release", "q:p", keeps_gil=True)


class Lease:
    """One buffer of a Pool until released or dropped.

    ``torch.frombuffer(lease.memory, dtype=torch.uint8)`` shares the memory and keeps the lease alive. ValueError for
    ``ptr`` and ``memory`` once released.
    """

    __slots__ = ("__weakref__", "_handle", "nbytes")

    def __init__(self, nbytes: int) -> None:
        """Make a lease of no buffer: `Pool.try_lease` gives it one."""
        self._handle = new_handle("lease")
        self.nbytes = nbytes

    @property
    def ptr(self) -> int:
        address: int | None = _lease_data(self._handle)
        if address is None:
            raise ValueError("this Lease was released; its buffer may be another's by now")
        return address

    @property
    def memory(self) -> memoryview:
        """The bytes, writable, with whatever the last user left in them."""
        return _memory(self, self.ptr, self.nbytes)

    def release(self) -> None:
        """Give the buffer back; tensors that still view it must not be used again. A second call does nothing."""
        _lease_release(self._handle)


class Pool:
    """``count`` buffers of ``buffer_bytes``, page aligned, all allocated here and lent out as leases.

    RuntimeError names the buffer that could not be had, the bytes, the cause (with the locked-memory limit) and what to
    do; also for every use in a forked child. ``pin`` and ``huge_pages`` as for Slab.
    """

    def __init__(self, buffer_bytes: int, count: int, pin: bool, huge_pages: bool) -> None:
        self._handle = new_handle("pool")
        self.buffer_bytes = buffer_bytes
        checked(_pool_new(ctypes.byref(self._handle), buffer_bytes, count, pin, huge_pages))

    def try_lease(self) -> Lease | None:
        """A buffer, with whatever its last user left in it, if one is free; never waits. RuntimeError when the pool is
        closed."""
        lease = Lease(self.buffer_bytes)
        return lease if checked(_pool_try_lease(self._handle, ctypes.byref(lease._handle))) else None

    @property
    def addresses(self) -> list[int]:
        """The addresses of all buffers, lent or not, until the pool is closed."""
        count = checked(_pool_addresses(self._handle, None, 0))
        found = (ctypes.c_uint64 * count)()
        return list(found[: checked(_pool_addresses(self._handle, found, count))])

    def close(self) -> None:
        """Free what is not lent; lent buffers are freed as they come back."""
        checked(_pool_close(self._handle))

    def stats(self) -> dict[str, int | bool]:
        """buffers, free, leased_peak, bytes (still held), pinned."""
        values = (ctypes.c_int64 * 5)()
        checked(_pool_stats(self._handle, values))
        buffers, free, leased_peak, nbytes, pinned = values
        return {
            "buffers": buffers,
            "free": free,
            "leased_peak": leased_peak,
            "bytes": nbytes,
            "pinned": bool(pinned),
        }


# ----------------------------------------------------------------------------------------------------------------------

_generations_new = function("generations_new", "q:ppqq")
_generations_bytes = function("generations_bytes", "q:q", keeps_gil=True)
_generations_publish = function("generations_publish", "q:pqq")
_generations_store = function("generations_store", "q:pqq", keeps_gil=True)
_generations_close = function("generations_close", "q:p")
_generations_value = function("generations_value", "q:pq", keeps_gil=True)
_generations_closed = function("generations_closed", "q:p", keeps_gil=True)
_generations_wait = function("generations_wait", "q:pqq")
_generations_interrupt = function("generations_interrupt", "q:p")
_generations_changes = function("generations_changes", "q:p", keeps_gil=True)
_generations_wait_change = function("generations_wait_change", "q:pq")
_generations_poke = function("generations_poke", "q:p")

Outcome = Literal["reached", "closed", "interrupted", "signal"]
_OUTCOMES: tuple[Outcome, ...] = ("reached", "closed", "interrupted", "signal")


class Generations:
    """``count`` counters of 32 bits at the beginning of a Slab, which their owner raises and others, in any process,
    wait for. Zeroed memory is a set of counters at 0. IndexError for a counter that there is not.
    """

    def __init__(self, slab: Slab, count: int) -> None:
        self._handle = new_handle("generations")
        self._slab = slab
        checked(_generations_new(ctypes.byref(self._handle), slab.ptr, slab.nbytes, count))

    @staticmethod
    def bytes(count: int) -> int:
        """Return the bytes that ``count`` counters need."""
        return checked(_generations_bytes(count))

    def publish(self, index: int, value: int) -> None:
        """Raise a counter, as its owner. A wait that it ends sees everything that the owner wrote before."""
        checked(_generations_publish(self._handle, index, value))

    def store(self, index: int, value: int) -> None:
        """Raise one of several counters that change together. No wait ends before the next event."""
        checked(_generations_store(self._handle, index, value))

    def close(self) -> None:
        """Say that nothing will be published any more, as the owner. Waits for higher numbers end."""
        checked(_generations_close(self._handle))

    def value(self, index: int) -> int:
        return checked(_generations_value(self._handle, index))

    @property
    def closed(self) -> bool:
        """Whether the owner has called `close`."""
        return bool(_generations_closed(self._handle))

    def wait(self, index: int, at_least: int) -> Outcome:
        """Sleep until counter ``index`` has reached ``at_least``, its owner has closed, this object was interrupted, or
        a signal wants its handler (then wait again)."""
        return _OUTCOMES[checked(_generations_wait(self._handle, index, at_least))]

    def interrupt(self) -> None:
        """End all waits on this object, those under way and those to come. For any thread."""
        checked(_generations_interrupt(self._handle))

    def changes(self) -> int:
        """A number that every event changes, for waits that look at several counters: read it, look at them, then
        `wait_change`, again and again."""
        return int(_generations_changes(self._handle))

    def wait_change(self, seen: int) -> None:
        """Sleep until `changes` is not ``seen`` any more, or a signal wants its handler, or for no reason."""
        checked(_generations_wait_change(self._handle, seen))

    def poke(self) -> None:
        """Make an event that changes no counter: all waits look again. For any thread."""
        checked(_generations_poke(self._handle))
