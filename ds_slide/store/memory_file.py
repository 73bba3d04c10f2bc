"""Host memory that other processes of the machine can map: a file in memory that has no name.

Not /dev/shm: that is 64 MB in a container by default, and what a process that was killed leaves there stays. This file
(`memfd_create`) is counted as memory of the processes that map it, and gone with the last of them.
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
    """The file of one process. It grows at its end; what has been mapped stays when the descriptor is closed."""

    def __init__(self) -> None:
        """OSError when the kernel gives none."""
        self.descriptor = os.memfd_create("ds_slide", os.MFD_CLOEXEC)
        self._end = 0

    def close(self) -> None:
        """Let go of the descriptor. Harmless when called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def append(self, nbytes: int) -> Range:
        """Whole pages of zeros. OSError when there is not so much memory: without this call it would be a SIGBUS at the
        first use."""
        added = Range(self._end, nbytes)
        end = self._end + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if end > self._end:
            os.posix_fallocate(self.descriptor, self._end, end - self._end)
        self._end = end
        return added


class SharedHostMemory:
    """What `HostMemory` does for flat tensors, in a memory file. `ranges`: of every tensor so far, in order; whoever
    makes the same tensors in another process gets the same ones."""

    def __init__(self, file: MemoryFile, memory: HostMemory) -> None:
        self._file = file
        self._memory = memory
        self.ranges: list[Range] = []

    def tensor(self, numel: int, dtype: torch.dtype, *, transfers: bool) -> torch.Tensor:
        """As `HostMemory.tensor`."""
        nbytes = numel * dtype.itemsize
        try:
            added = self._file.append(nbytes)
        except OSError as error:
            raise self._memory.refusal(nbytes, transfers, error) from error
        self.ranges.append(added)
        return self._memory.mapped(self._file.descriptor, added.offset, numel, dtype, transfers=transfers)


def map_bytes(descriptor: int, part: Range) -> Any:
    """A `_native.Slab` over a part of a memory file, not page-locked."""
    from ds_slide import _native

    return _native.Slab(descriptor, part.offset, part.nbytes, False, False)
