"""Host memory that other processes of the machine can map: a file in memory that has no name.

It is not in /dev/shm, which has 64 MB in a container by default and keeps the files of a killed process. This file
(`memfd_create`) counts as memory of the processes that map it, and is gone with the last of them.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch

from ds_slide.store.host_memory import HostMemory


@dataclass(frozen=True)
class Range:
    """Bytes of a memory file."""

    offset: int
    nbytes: int


class MemoryFile:
    """The file of one process. It grows at its end. Mapped memory stays when the descriptor is closed."""

    def __init__(self) -> None:
        """Make the file. Raises OSError where the kernel refuses."""
        self.descriptor = os.memfd_create("ds_slide", os.MFD_CLOEXEC)
        self._end = 0

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def append(self, nbytes: int) -> Range:
        """Add whole pages of zeros. Raises OSError where memory does not suffice. Without `posix_fallocate` the first
        use would be a SIGBUS."""
        added = Range(self._end, nbytes)
        end = self._end + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if end > self._end:
            os.posix_fallocate(self.descriptor, self._end, end - self._end)
        self._end = end
        return added


class SharedHostMemory:
    """Hands out flat tensors like `HostMemory`, in a memory file. `ranges`: the ranges of all tensors so far, in order.
    Another process that makes the same tensors gets the same ranges."""

    def __init__(self, file: MemoryFile, memory: HostMemory) -> None:
        self._file = file
        self._memory = memory
        self.ranges: list[Range] = []

    def tensor(self, numel: int, dtype: torch.dtype, *, transfers: bool) -> torch.Tensor:
        """Return a tensor like `HostMemory.tensor`."""
        nbytes = numel * dtype.itemsize
        try:
            added = self._file.append(nbytes)
        except OSError as error:
            raise self._memory.refusal(nbytes, transfers, error) from error
        self.ranges.append(added)
        place = (self._file.descriptor, added.offset)
        return self._memory.tensor(numel, dtype, transfers=transfers, place=place)


def map_bytes(descriptor: int, part: Range) -> Any:
    """Return a `_native.Slab` over a part of a memory file, not page-locked."""
    from ds_slide import _native

    return _native.Slab(part.nbytes, False, False, (descriptor, part.offset))
