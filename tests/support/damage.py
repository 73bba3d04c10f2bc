"""What a disk or another program may do to the state file of a running engine.

The file is found among the descriptors of this process, by its size: so it is whatever its name, and without one.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ds_slide.store.ssd.extents import PAGE
from ds_slide.store.ssd.store import SsdStore

_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

KINDS = ("byte flipped", "hole punched", "cut and regrown", "old copy", "swapped")


@dataclass(frozen=True)
class Extent:
    offset: int
    nbytes: int


@dataclass(frozen=True)
class StateFile:
    """An open state file of a store."""

    descriptor: int

    def read(self, extent: Extent) -> bytes:
        data = os.pread(self.descriptor, extent.nbytes, extent.offset)
        assert len(data) == extent.nbytes
        return data

    def write(self, extent: Extent, data: bytes) -> None:
        assert os.pwrite(self.descriptor, data, extent.offset) == len(data) == extent.nbytes

    def damage(self, kind: str, extent: Extent, other: Extent, old: bytes) -> None:
        """`kind`: one of KINDS. `other`: an extent of this size, with other bytes. `old`: what the extent held once.
        Nothing may be on its way to the file."""
        before = self.read(extent)
        if kind == "byte flipped":
            at = extent.nbytes // 2 + 1  # within what is padded to whole pages
            self.write(extent, before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
        elif kind == "hole punched":
            assert _libc.fallocate(self.descriptor, _PUNCH_HOLE_KEEP_SIZE, extent.offset, extent.nbytes) == 0
        elif kind == "cut and regrown":
            size = os.fstat(self.descriptor).st_size
            os.ftruncate(self.descriptor, extent.offset)
            os.ftruncate(self.descriptor, size)
        elif kind == "old copy":
            self.write(extent, old)
        else:
            assert kind == "swapped"
            self.write(extent, self.read(other))
            self.write(other, before)
        assert self.read(extent) != before, "this is no damage"
        os.fsync(self.descriptor)


@contextmanager
def state_file_of(store: SsdStore, mount: int = 0) -> Iterator[StateFile]:
    """`mount`: which of several, whose files have different sizes."""
    size = store.files.striping.file_sizes(store.nbytes)[mount]
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            status = os.stat(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # of the listing itself
            continue
        if stat.S_ISREG(status.st_mode) and status.st_size == size + PAGE:
            found.append((status.st_dev, status.st_ino, number))
    assert len({file[:2] for file in found}) == 1, "one file has this size"
    descriptor = os.open(f"/proc/self/fd/{found[0][2]}", os.O_RDWR)
    try:
        yield StateFile(descriptor)
    finally:
        os.close(descriptor)
