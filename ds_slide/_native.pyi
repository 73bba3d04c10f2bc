"""C++ core (csrc/).

Every pointer is an address as an int; arrays hold ``numel`` elements and need element alignment only. Long calls
release the GIL. ValueError for an argument outside its range.
"""

from collections.abc import Sequence
from typing import Literal, overload

_Dtype = Literal["bf16", "fp16", "fp32"]
_Isa = Literal["auto", "avx512", "avx2", "portable"]

class Workers:
    """Persistent threads, asleep between calls; calls on one object run one after the other.

    Thread ``i`` is pinned to ``cores[i % len(cores)]`` unless ``cores`` is empty. RuntimeError when a thread cannot be
    started or pinned, and when used in a child forked after the threads were made.
    """

    def __init__(self, num_threads: int, cores: list[int]) -> None: ...
    @property
    def num_threads(self) -> int: ...

class Slab:
    """Host memory of ``nbytes`` bytes, page aligned, mapped in whole pages, not inherited by fork: zero-filled and its
    own, or the bytes from ``offset`` (whole pages) of the memory file ``descriptor``, shared with all who map it.

    The file must be long enough (ValueError), and its descriptor may be closed afterwards.
    ``pin`` page-locks it through the CUDA driver, usable from every context; RuntimeError when that fails. A writable
    buffer of unsigned bytes: ``torch.frombuffer(slab, dtype=torch.uint8)`` shares the memory and keeps the slab alive.
    """

    @overload
    def __init__(self, nbytes: int, pin: bool, huge_pages: bool) -> None: ...
    @overload
    def __init__(self, descriptor: int, offset: int, nbytes: int, pin: bool, huge_pages: bool) -> None: ...
    @property
    def ptr(self) -> int:
        """Address of the first byte; 0 when closed or when ``nbytes`` is 0."""
    @property
    def nbytes(self) -> int:
        """The size asked for, in bytes."""
    @property
    def pinned(self) -> bool: ...
    def close(self) -> None:
        """Unlock and unmap; tensors that still view the memory must not be used again. A second call does nothing."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Generations:
    """``count`` counters of 32 bits at the beginning of a Slab, which their owner raises and others, in any process,
    wait for. Zeroed memory is a set of counters at 0. IndexError for a counter that there is not.
    """

    def __init__(self, slab: Slab, count: int) -> None: ...
    @staticmethod
    def bytes(count: int) -> int:
        """That ``count`` counters need."""
    def publish(self, index: int, value: int) -> None:
        """The owner: what it wrote before is seen by those whose wait this ends."""
    def store(self, index: int, value: int) -> None:
        """As `publish`, for one of several counters that change together: nobody wakes up before the next event."""
    def close(self) -> None:
        """The owner: nothing will be published any more; waits for more than there is end."""
    def value(self, index: int) -> int: ...
    @property
    def closed(self) -> bool:
        """Whether the owner has called `close`."""
    def wait(self, index: int, at_least: int) -> Literal["reached", "closed", "interrupted", "signal"]:
        """Sleep until counter ``index`` has reached ``at_least``, its owner has closed, this object was interrupted, or
        a signal wants its handler (then wait again)."""
    def interrupt(self) -> None:
        """End all waits on this object, those under way and those to come. For any thread."""
    def changes(self) -> int:
        """A number that every event changes, for waits that look at several counters: read it, look at them, then
        `wait_change`, again and again."""
    def wait_change(self, seen: int) -> None:
        """Sleep until `changes` is not ``seen`` any more, or a signal wants its handler, or for no reason."""
    def poke(self) -> None:
        """An event that changes no counter: all who wait look again. For any thread."""

class Lease:
    """One buffer of a Pool until released or dropped; a writable buffer of unsigned bytes.

    ``torch.frombuffer(lease, dtype=torch.uint8)`` shares the memory and keeps the lease alive. ValueError or
    BufferError for ``ptr`` and the buffer once released.
    """

    @property
    def ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def release(self) -> None:
        """Give the buffer back; tensors that still view it must not be used again. A second call does nothing."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Pool:
    """``count`` buffers of ``buffer_bytes``, page aligned, all allocated here and lent out as leases.

    RuntimeError names the buffer that could not be had, the bytes, the cause (with the locked-memory limit) and what to
    do; also for every use in a forked child. ``pin`` and ``huge_pages`` as for Slab.
    """

    def __init__(self, buffer_bytes: int, count: int, pin: bool, huge_pages: bool) -> None: ...
    def try_lease(self) -> Lease | None:
        """A buffer, with whatever its last user left in it, if one is free; never waits. RuntimeError when the pool is
        closed."""
    @property
    def buffer_bytes(self) -> int: ...
    @property
    def addresses(self) -> list[int]:
        """Of all buffers, lent or not, until it is closed."""
    def close(self) -> None:
        """Free what is not lent; lent buffers are freed as they come back."""
    def stats(self) -> dict[str, int | bool]:
        """buffers, free, leased_peak, bytes (still held), pinned."""

class Turns:
    """Whether reads or writes go to the device next, and how many (``csrc/io/turns.hpp``), by itself to be tested with
    any clock."""

    def __init__(self, burst_bytes: int | None, depth: int, low_depth: int | None = None) -> None: ...
    def writes_next(self, reads_wait: bool, writes_wait: bool) -> bool:
        """True for a write."""
    def started(self, nbytes: int) -> None:
        """So many bytes of the kind chosen last went to the device."""
    def finished(self, nbytes: int, now_s: float, both_wait: bool) -> None:
        """So many bytes were moved by ``now_s``."""
    @property
    def burst_bytes(self) -> int:
        """Length of the bursts now, 0 for one request."""
    @property
    def depth(self) -> int:
        """Requests that may be at the device now."""

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
    @property
    def backend(self) -> Literal["io_uring", "libaio", "threads"]: ...
    def open(self, path: str, nbytes: int, descriptor: int | None = None) -> int:
        """Make a file (mode 0600, must not exist) with ``nbytes`` allocated, or open an existing one with ``nbytes`` 0.

        With ``descriptor`` the file is the one that is open there for reading and writing, empty where ``nbytes`` is
        not 0, and ``path`` only names it in errors. The descriptor stays the caller's; it gets O_DIRECT as well.

        Returns its number. OSError with errno, path, and when there is no room the bytes needed and the bytes free;
        nothing is left behind then.
        """
    def is_direct(self, file: int) -> bool:
        """Whether the filesystem takes O_DIRECT; if not, the file goes through the page cache."""
    def register_memory(self, address: int, nbytes: int) -> bool:
        """Keep the pages of a range at hand for the kernel; False when the backend or RLIMIT_MEMLOCK do not allow it.

        Transfers work either way. The range must stay mapped until ``unregister_memory`` or ``close``: what is mapped
        at the same address afterwards would not be what is read and written. ValueError when it overlaps another one.
        """
    def unregister_memory(self, address: int) -> None:
        """For the start of a range as registered, with no transfer under way in it; otherwise does nothing."""
    def submit(self, token: int, write: bool, pieces: list[tuple[int, int, int, int]], urgent: bool) -> None:
        """Start a transfer of pieces ``(file, offset, address, nbytes)``, multiples of 4096; one completion for all.

        Never waits for the device. ValueError, with nothing queued, for a piece that is out of range.
        """
    def next(self, timeout_s: float | None) -> tuple[int, str | None, int] | None:
        """The next finished transfer: ``(token, None, 0)``, or ``(token, sentence, errno)`` if a request failed.

        None after ``timeout_s`` seconds, or when closed and all have been told. The memory is no longer touched.
        ``timeout_s`` None waits for one or the other, asleep, and is for a thread that handles no signals.
        """
    def sync(self, file: int) -> None:
        """Wait until what finished transfers wrote to the file is on the device. OSError when it may be lost."""
    def stats(self) -> dict[str, int | float | str | bool]:
        """Totals since the start: ``read_bytes``, ``written_bytes``, ``read_requests``, ``write_requests`` of requests
        done; ``repeated_requests`` (interrupted or short, sent again); ``busy_s``, ``read_busy_s``, ``write_busy_s``,
        the time with at least one in flight; ``latency_s``, the mean of a request at the device. Now: ``burst_bytes``
        and ``depth`` (what was measured to be best, or given), ``in_flight`` (requests), ``unfinished`` (transfers),
        ``registered_buffers``, ``registered_bytes``, ``registered_files``, ``direct_files``, ``buffered_files``,
        ``backend`` and ``skipped_backends`` (those that "auto" could not use, and why)."""
    def close(self) -> None:
        """Wait for the requests in flight and close the files; transfers not wholly started end with ECANCELED.

        ``next`` still tells of all of them. A second call does nothing.
        """

def sum_isa() -> Literal["sse42", "portable"]:
    """How CRC32C is computed on this processor; both give the same values."""

def page_sums(
    workers: Workers, address: int, nbytes: int, sums_ptr: int, isa: Literal["auto", "sse42", "portable"] = "auto"
) -> None:
    """CRC32C (RFC 3720) of every 4096 of ``nbytes`` bytes, into the uint32 at ``sums_ptr``. ``address`` may be any."""

def first_wrong_page(
    workers: Workers, address: int, nbytes: int, sums_ptr: int, isa: Literal["auto", "sse42", "portable"] = "auto"
) -> int | None:
    """The first page whose CRC32C is not that at ``sums_ptr``. A sum of 0 is one that is not known: it agrees with any
    page."""

def isa() -> Literal["avx512", "avx2", "portable"]:
    """Best instruction set of this processor. All three give the same bits."""

UPDATE_SLICE: int
SLICE_LOG_BYTES: int

def update(
    workers: Workers,
    rule: str,
    weight_format: Literal["bf16_split", "fp32", "fp16_master"],
    weight_ptr: int,
    remainder_ptr: int,
    state_ptrs: Sequence[int],
    grad_ptr: int,
    grad_dtype: _Dtype,
    numel: int,
    numbers: Sequence[float],
    isa: _Isa = "auto",
    state_format: Literal["fp32", "bf16", "8bit"] = "fp32",
    scale_ptrs: Sequence[int] = (),
    seed: int = 0,
    step: int = 1,
    first: int = 0,
    part: Literal["whole", "weights", "states", "with_log", "back", "rest", "out_of_place"] = "whole",
    new_weight_ptr: int = 0,
    old_ptrs: Sequence[int] = (),
    low_ptrs: Sequence[int] = (),
    slices_ptr: int = 0,
    new_remainder_ptr: int = 0,
    new_state_ptrs: Sequence[int] = (),
) -> None:
    """One step of ``rule`` in place, in one pass over memory; ``step`` is 1 at the first update.

    ``part``: the "weights" alone, and then, from the same gradient, the "states" alone, which leaves the same bits;
    ValueError for a rule whose new states depend on the old weight.

    ``rule`` is the name of its kernels in csrc/update/types.hpp, ``numbers`` its numbers of this step in their order
    there, the factor on the gradient first.

    ``bf16_split``: weight bf16, remainder int16. ``fp32``: weight float, remainder unused (0). ``fp16_master``: weight
    an fp16 copy that is written only, remainder the float master.

    The states are all float, all bf16, or all bytes with a float scale for every 64 of them. Those that are not float
    are rounded by random bits of (``seed``, ``step``, ``first`` + index); ``first`` is a multiple of 64.

    ``new_weight_ptr``, where it is not 0, gets the new weight, and ``weight_ptr`` stays as it is. ``old_ptrs``:
    nothing, or where the old bytes of weight, remainder, states and scales go, 0 for those that are not wanted.

    "with_log" is the whole step with a log, of ``low_ptrs`` (a byte an element, for the weight and each state) and
    ``slices_ptr`` (`SLICE_LOG_BYTES` for every `UPDATE_SLICE` elements), as far as that has room; "back" with the same
    arguments gives the old bits back, and uses ``new_weight_ptr`` up; "rest" does what there was no room for. For
    states in float, and not for ``fp16_master``.

    "out_of_place" is the whole step with what it writes in ``new_weight_ptr``, ``new_remainder_ptr`` (0 for ``fp32``)
    and ``new_state_ptrs``, each at a multiple of 64 bytes, past the caches. For states in float.
    """

def copy(workers: Workers, to_ptr: int, from_ptr: int, nbytes: int) -> None:
    """Copy bytes to memory that is not read soon."""

def accumulate(
    workers: Workers, dst_ptr: int, dst_dtype: _Dtype, src_ptr: int, src_dtype: _Dtype, numel: int, isa: _Isa = "auto"
) -> None:
    """``dst = round(float(dst) + float(src))``, to nearest even."""

def sum_of_squares(workers: Workers, ptr: int, dtype: _Dtype, numel: int, isa: _Isa = "auto") -> float:
    """Sum of squares in fp64; the same bits for any thread count. Infinities and NaN propagate."""
