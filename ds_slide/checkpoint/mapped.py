"""Files of torch.save read through a memory map, whose pages are given back as soon as they have been used.

A page that has been read counts as memory of the process until the kernel takes it back; a checkpoint is larger than
what is free beside the model.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch

from ds_slide.checkpoint.restricted import is_zip, load_open, regular_checkpoint_file

_MADV_WILLNEED, _MADV_DONTNEED = 3, 4
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedFiles:
    """Loads files, and knows which addresses are maps of them: anywhere else, giving pages back would lose data."""

    def __init__(self) -> None:
        self._ranges: set[tuple[int, int]] = set()

    def load(self, path: str, map_location: Any) -> Any:
        """The content of a file, read as `restricted` says; the tensors are maps of the file. A file in torch's old
        format, which cannot be mapped, is read into memory. Raises FileNotFoundError, SlideError."""
        with regular_checkpoint_file(path) as file:
            if not is_zip(file):
                return load_open(file, path, map_location, mapped=False)
            before = _maps_of(file)
            value = load_open(file, path, map_location, mapped=True)
            self._ranges |= _maps_of(file) - before
            return value

    @contextlib.contextmanager
    def using(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """A contiguous tensor that is read once: from disk in one go at the beginning, out of memory at the end."""
        self._advise(tensor, _MADV_WILLNEED)
        yield tensor
        self._advise(tensor, _MADV_DONTNEED)

    def _advise(self, tensor: torch.Tensor, advice: int) -> None:
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for first, last in self._ranges:
            if first <= start < stop <= last:
                start -= start % _PAGE
                _libc.madvise(start, stop - start, advice)  # advice only: whatever it answers


def _maps_of(file: BinaryIO) -> set[tuple[int, int]]:
    """Address ranges in which this process has mapped a file."""
    inode = str(os.fstat(file.fileno()).st_ino)
    name = os.path.basename(os.readlink(f"/proc/self/fd/{file.fileno()}"))  # in a directory of links, another one
    ranges = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if fields[4] == inode and len(fields) == 6 and os.path.basename(fields[5].strip()) == name:
                first, last = fields[0].split("-")
                ranges.add((int(first, 16), int(last, 16)))
    return ranges
