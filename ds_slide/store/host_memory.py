"""Host memory of the states: slabs of their exact size, page-locked where the GPU copies from or to them."""

from __future__ import annotations

import ctypes
import functools
import mmap
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ds_slide.errors import SlideError
from ds_slide.report.log import size


class HostMemory:
    """Hands out host tensors in slabs of their exact size, and knows how much it has handed out."""

    def __init__(self, *, page_lock: bool, huge_pages: bool) -> None:
        self._page_lock = page_lock
        self._huge_pages = huge_pages
        self.total_bytes = 0
        self.pinned_bytes = 0
        self._tensors: list[torch.Tensor] = []
        self._touched: set[int] = set()
        """Addresses of tensors whose pages have all been touched."""

    def tensor(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        transfers: bool,
        place: tuple[int, int] | None = None,
        counts: bool = True,
    ) -> torch.Tensor:
        """A zeroed flat tensor. `transfers`: the GPU copies from or to it, so it is page-locked. `place`: a descriptor
        and the offset of memory in that file, None for new memory. `counts`: this process has brought the memory, no
        other."""
        from ds_slide import _native

        if numel == 0:
            return torch.empty(0, dtype=dtype)
        size = numel * dtype.itemsize
        pin = self._page_lock and transfers
        try:
            slab = _native.Slab(size, pin, self._huge_pages, place)
        except (RuntimeError, MemoryError, ValueError) as error:
            raise self.refusal(size, transfers, error) from error
        whole = torch.frombuffer(slab.memory, dtype=torch.uint8, count=size)
        if counts:
            self._count(size, pin)
            self._tensors.append(whole)
        return whole.view(dtype)

    def give_back(self, tensor: torch.Tensor, *, transfers: bool) -> None:
        """Let go of a tensor that `tensor` made. Its memory is freed when its last user drops it."""
        if not tensor.numel():
            return
        self._tensors = [each for each in self._tensors if each.data_ptr() != tensor.data_ptr()]
        self._touched.discard(tensor.data_ptr())
        self._count(-tensor.nbytes, self._page_lock and transfers)

    def untouched_bytes(self) -> int:
        """Return the bytes of these tensors that the operating system still counts as free. All are still in use.

        A tensor is looked at until all its pages have been touched. A look at 91 GB takes 0.24 s
        (benchmarks/results/2026-11-27_nvidia-h100_recorded-blocks_3.md), and each forward may ask where memory is
        short."""
        untouched = 0
        for tensor in self._tensors:
            if (address := tensor.data_ptr()) not in self._touched:
                untouched += (found := untouched_bytes([(address, tensor.numel())]))
                if not found:
                    self._touched.add(address)
        return untouched

    def forget(self) -> None:
        """Drop all references to tensors. Each is freed when its last user drops it."""
        self._tensors.clear()
        self._touched.clear()

    def pool(self, nbytes: int, count: int, *, transfers: bool) -> Any:
        """A `_native.Pool` of `count` page-aligned buffers of `nbytes` each. `transfers`: as in `tensor`.

        The buffers use huge pages where the kernel has them. A request of 1 MiB in scattered small pages has 256
        segments: a disk's queue takes 254 at once, and the host walks each. With huge pages reads of one virtual disk
        went from 1.1 to 1.6 GB/s, and writes from 1.9 to 2.6.
        """
        from ds_slide import _native

        pin = self._page_lock and transfers
        try:
            pool = _native.Pool(nbytes, count, pin, True)
        except (RuntimeError, MemoryError) as error:
            raise self.refusal(nbytes * count, transfers, error) from error
        self._count(nbytes * count, pin)
        return pool

    def _count(self, nbytes: int, pin: bool) -> None:
        self.total_bytes += nbytes
        self.pinned_bytes += nbytes if pin else 0

    def refusal(self, nbytes: int, transfers: bool, error: BaseException) -> SlideError:
        """Return the error for a failed allocation of `nbytes`."""
        of_memory = " of page-locked memory" if self._page_lock and transfers else ""
        return SlideError(
            f"host tier: {size(nbytes)}{of_memory} could not be had after "
            f"{size(self.total_bytes)} ({error}); lower ds_slide.host_memory, raise ds_slide.gpu_states, "
            "or use a machine with more memory"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Memory that a process has allocated but not touched yet. The operating system still counts it as free.


def untouched_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """Return how many bytes of page-aligned memory, given as (address, bytes), were never touched. A page that was
    swapped out counts as untouched."""
    return sum(_untouched_pages(address, -(-size // mmap.PAGESIZE)) for address, size in ranges) * mmap.PAGESIZE


def _untouched_pages(address: int, pages: int) -> int:
    untouched, most = 0, 1 << 20  # pages of one call of mincore, which returns a byte a page
    for first in range(0, pages, most):
        count = min(most, pages - first)
        present = ctypes.create_string_buffer(count)
        start, length = address + first * mmap.PAGESIZE, count * mmap.PAGESIZE
        if _mincore()(ctypes.c_void_p(start), ctypes.c_size_t(length), present) == 0:
            # The lowest bit of each byte says whether the page is there; the others are reserved.
            untouched += count - sum(present.raw.translate(_LOWEST_BIT))
    return untouched


_LOWEST_BIT = bytes(value & 1 for value in range(256))


@functools.cache
def _mincore() -> Any:
    return ctypes.CDLL(None).mincore


# ----------------------------------------------------------------------------------------------------------------------
# The shell's limit on page-locked memory (RLIMIT_MEMLOCK, `ulimit -l`).
#
# mlock keeps to it. NVIDIA's driver does not: for a user without privileges and with a limit of 64 KiB it registered
# 1 GiB (driver 580.159, Linux 6.18), while mlock of 64 MiB failed. Most systems set 8 MiB: a budget of 8 MiB would
# refuse nearly every run that works. So a trial registration finds out whether this driver keeps to the limit, before
# a run takes memory.

_STATUS = Path("/proc/self/status")


def page_lock_limit() -> int | None:
    """Return the limit in bytes, None where this process has none."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY or _is_exempt() else soft


def require_page_locks(nbytes: int) -> None:
    """Raise SlideError where `nbytes` of page-locked memory exceed a limit that the driver keeps to. `nbytes` is the
    most memory that the GPU copies from in the run."""
    from ds_slide import _native

    limit = page_lock_limit()
    # A trial beyond a limit above 1 GiB is skipped, because it takes 0.35 s a GiB. If the driver keeps to such a limit,
    # the error comes while the states are placed.
    if limit is None or nbytes <= limit or limit > 1 << 30:
        return
    try:
        _native.Slab(limit + (4 << 20), True, False).close()
    except RuntimeError as error:
        raise SlideError(
            f"host tier: the GPU copies from up to {size(nbytes)} of page-locked memory, but RLIMIT_MEMLOCK "
            f"(ulimit -l) is {size(limit)} and the driver keeps to it ({' '.join(str(error).split())}); "
            "raise that limit, as with `ulimit -l unlimited` or the container's --ulimit memlock=-1"
        ) from error


def _is_exempt() -> bool:
    """Whether this process has the capability CAP_IPC_LOCK, as root has."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 14 & 1)  # CAP_IPC_LOCK is bit 14
    return False
