"""Asynchronous transfers between memory and files."""

from __future__ import annotations

import ctypes
import math
import os
import time
from itertools import chain
from struct import pack
from typing import Literal

from ds_slide._native.library import checked, function, integer, last_sentence, new_handle

_io_new = function("io_new", "q:ppqqpp")
_io_backend = function("io_backend", "q:ppq", keeps_gil=True)
_io_open = function("io_open", "q:ppqp")
_io_is_direct = function("io_is_direct", "q:pq")
_io_register_memory = function("io_register_memory", "q:pqq")
_io_unregister_memory = function("io_unregister_memory", "q:pq")
_io_submit = function("io_submit", "q:pqqpqq")
_io_next = function("io_next", "q:pdp")
_io_sync = function("io_sync", "q:pq")
_io_stats = function("io_stats", "q:ppp", keeps_gil=True)
_io_close = function("io_close", "q:p")

_SIGNAL_CHECK_S = 0.2
"""While it waits, `IoEngine.next` lets Python look so often whether Ctrl-C was pressed."""
_FINISHED, _CLOSED = 1, 2
"""Results of `io_next`."""

_COUNTS = (
    *("read_bytes", "written_bytes", "read_requests", "write_requests", "repeated_requests", "in_flight"),
    *("unfinished", "registered_bytes", "registered_files", "direct_files", "buffered_files", "burst_bytes", "depth"),
)
_SECONDS = ("busy_s", "read_busy_s", "write_busy_s", "latency_s")

Backend = Literal["io_uring", "libaio", "threads"]


class IoEngine:
    """Asynchronous transfers between memory and files with several requests in flight; for several threads at once.

    Transfers start in the order of ``submit``, urgent ones first, reads and writes in turns while both wait, but
    overlap and end in any order: who reads what a transfer writes waits for its completion. The memory of a
    transfer must stay valid until ``next`` returns its token.
    RuntimeError for every call but ``close``, ``next`` and ``stats`` once closed, and for every call in a forked child.
    """

    def __init__(
        self,
        backend: Literal["auto", "io_uring", "libaio", "threads"],
        queue_depth: int,
        request_bytes: int,
        burst_bytes: int | None = None,
        low_depth: int | None = None,
    ) -> None:
        """At most ``queue_depth`` requests (1 to 4096) of at most ``request_bytes`` (a multiple of 4096, up to 1 GiB).

        ``burst_bytes``: of reads or writes until the others have their turn, 0 for one request, None for whichever of 0
        and 256 MiB is measured to be faster. With ``low_depth`` only so many requests are at the device, unless
        ``queue_depth`` of them are measured to be 5 % faster; urgent ones may always be more. "auto" takes the first
        backend that works. RuntimeError with the errno text when the one named does not.
        """
        self._handle = new_handle("io")
        place = ctypes.byref(self._handle)
        burst, low = integer(burst_bytes), integer(low_depth)
        checked(_io_new(place, backend.encode(), queue_depth, request_bytes, burst, low))

    @property
    def backend(self) -> Backend:
        name = ctypes.create_string_buffer(16)
        checked(_io_backend(self._handle, name, len(name)))
        return name.value.decode()  # type: ignore[return-value]

    def open(self, path: str, nbytes: int, descriptor: int | None = None) -> int:
        """Make a file (mode 0600, must not exist) with ``nbytes`` allocated, or open an existing one with ``nbytes`` 0.

        With ``descriptor`` the file is the one that is open there for reading and writing, empty where ``nbytes`` is
        not 0, and ``path`` only names it in errors. The descriptor stays the caller's; it gets O_DIRECT as well.

        Returns its number. OSError with errno, path, and when there is no room the bytes needed and the bytes free;
        nothing is left behind then.
        """
        return checked(_io_open(self._handle, os.fsencode(path), nbytes, integer(descriptor)))

    def is_direct(self, file: int) -> bool:
        """Whether the filesystem takes O_DIRECT; if not, the file goes through the page cache."""
        return bool(checked(_io_is_direct(self._handle, file)))

    def register_memory(self, address: int, nbytes: int) -> bool:
        """Keep the pages of a range at hand for the kernel; False when the backend or RLIMIT_MEMLOCK do not allow it.

        Transfers work either way. The range must stay mapped until ``unregister_memory`` or ``close``: what is mapped
        at the same address afterwards would not be what is read and written. ValueError when it overlaps another one.
        """
        return bool(checked(_io_register_memory(self._handle, address, nbytes)))

    def unregister_memory(self, address: int) -> None:
        """For the start of a range as registered, with no transfer under way in it; otherwise does nothing."""
        checked(_io_unregister_memory(self._handle, address))

    def submit(self, token: int, write: bool, pieces: list[tuple[int, int, int, int]], urgent: bool) -> None:
        """Start a transfer of pieces ``(file, offset, address, nbytes)``, multiples of 4096; one completion for all.

        Never waits for the device. ValueError, with nothing queued, for a piece that is out of range.
        """
        packed = pack(f"{4 * len(pieces)}q", *chain.from_iterable(pieces))
        checked(_io_submit(self._handle, token, write, packed, len(pieces), urgent))

    def next(self, timeout_s: float | None) -> tuple[int, str | None, int] | None:
        """The next finished transfer: ``(token, None, 0)``, or ``(token, sentence, errno)`` if a request failed.

        None after ``timeout_s`` seconds, or when closed and all have been told. The memory is no longer touched.
        ``timeout_s`` None waits for one or the other, asleep, and is for a thread that handles no signals: Python's own
        go to the main thread.
        """
        finished = (ctypes.c_int64 * 2)()
        longest = math.inf if timeout_s is None else _SIGNAL_CHECK_S
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            state = checked(_io_next(self._handle, min(left, longest), finished))
            if state == _FINISHED:
                token, error = finished
                return token, last_sentence() if error else None, error
            if state == _CLOSED or left <= longest != math.inf:
                return None

    def sync(self, file: int) -> None:
        """Wait until what finished transfers wrote to the file is on the device. OSError when it may be lost."""
        checked(_io_sync(self._handle, file))

    def stats(self) -> dict[str, int | float | str | bool]:
        """Totals since the start: ``read_bytes``, ``written_bytes``, ``read_requests``, ``write_requests`` of requests
        done; ``repeated_requests`` (interrupted or short, sent again); ``busy_s``, ``read_busy_s``, ``write_busy_s``,
        the time with at least one in flight; ``latency_s``, the mean of a request at the device. Now: ``burst_bytes``
        and ``depth`` (what was measured to be best, or given), ``in_flight`` (requests), ``unfinished`` (transfers),
        ``registered_buffers``, ``registered_bytes``, ``registered_files``, ``direct_files``, ``buffered_files``,
        ``backend`` and ``skipped_backends`` (which "auto" could not use, and why)."""
        counts, seconds = (ctypes.c_int64 * len(_COUNTS))(), (ctypes.c_double * len(_SECONDS))()
        checked(_io_stats(self._handle, counts, seconds))
        return {
            "backend": self.backend,
            "skipped_backends": last_sentence(),
            "registered_buffers": counts[_COUNTS.index("registered_bytes")] > 0,
            **dict(zip(_COUNTS, counts, strict=True)),
            **dict(zip(_SECONDS, seconds, strict=True)),
        }

    def close(self) -> None:
        """Wait for the requests in flight and close the files; transfers not wholly started end with ECANCELED.

        ``next`` still tells of all of them. A second call does nothing.
        """
        checked(_io_close(self._handle))


_turns_new = function("turns_new", "q:ppqp")
_turns_writes_next = function("turns_writes_next", "q:pqq", keeps_gil=True)
_turns_started = function("turns_started", "q:pq", keeps_gil=True)
_turns_finished = function("turns_finished", "q:pqdq", keeps_gil=True)
_turns_burst_bytes = function("turns_burst_bytes", "q:p", keeps_gil=True)
_turns_depth = function("turns_depth", "q:p", keeps_gil=True)


class Turns:
    """Whether reads or writes go to the device next, and how many (``csrc/io/turns.hpp``), by itself to be tested with
    any clock."""

    def __init__(self, burst_bytes: int | None, depth: int, low_depth: int | None = None) -> None:
        self._handle = new_handle("turns")
        checked(_turns_new(ctypes.byref(self._handle), integer(burst_bytes), depth, integer(low_depth)))

    def writes_next(self, reads_wait: bool, writes_wait: bool) -> bool:
        """True for a write."""
        return bool(_turns_writes_next(self._handle, reads_wait, writes_wait))

    def started(self, nbytes: int) -> None:
        """Note that ``nbytes`` of the kind chosen last went to the device."""
        checked(_turns_started(self._handle, nbytes))

    def finished(self, nbytes: int, now_s: float, both_wait: bool) -> None:
        """Note that ``nbytes`` had been moved at ``now_s``."""
        checked(_turns_finished(self._handle, nbytes, now_s, both_wait))

    @property
    def burst_bytes(self) -> int:
        """Length of the bursts now, 0 for one request."""
        return int(_turns_burst_bytes(self._handle))

    @property
    def depth(self) -> int:
        """Requests that may be at the device now."""
        return int(_turns_depth(self._handle))
