"""Files of torch.save read through a memory map, whose pages are given back as soon as they have been used.

A page that has been read counts as memory of the process until the kernel takes it back; a checkpoint is larger than
what is free beside the model.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import zipfile
from collections.abc import Iterator
from typing import Any

import torch

from ds_slide.errors import SlideError

_MADV_WILLNEED, _MADV_DONTNEED = 3, 4
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedFiles:
    """Loads files, and knows which addresses are maps of them: anywhere else, giving pages back would lose data."""

    def __init__(self) -> None:
        self._ranges: set[tuple[int, int]] = set()

    def load(self, path: str, map_location: Any) -> Any:
        """As torch.load; the tensors are maps of the file. A file in torch's old format, which cannot be mapped, is
        read into memory. Raises SlideError for a file that is none of torch.save's."""
        mapped = zipfile.is_zipfile(path)
        before = _maps_of(path) if mapped else set()
        try:
            value = torch.load(path, map_location=map_location, weights_only=False, mmap=mapped)
        except FileNotFoundError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise SlideError(
                f"the checkpoint file {path} cannot be loaded ({type(error).__name__}: {reason}); load another tag or "
                "a copy of this one"
            ) from error
        if mapped:
            self._ranges |= _maps_of(path) - before
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


def _maps_of(path: str) -> set[tuple[int, int]]:
    """Address ranges in which this process has mapped a file."""
    inode, name = str(os.stat(path).st_ino), os.path.basename(path)
    ranges = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if fields[4] == inode and len(fields) == 6 and os.path.basename(fields[5].strip()) == name:
                first, last = fields[0].split("-")
                ranges.add((int(first, 16), int(last, 16)))
    return ranges
