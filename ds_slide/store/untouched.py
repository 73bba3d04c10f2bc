"""Memory that a process has been given and has not touched yet: the operating system still counts it as free."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Iterable
from typing import Any

_LOOK_PAGES = 1 << 20
"""Pages of one question to the kernel, which answers with a byte a page."""


def untouched_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """Bytes that were never touched of page-aligned memory, given as (address, bytes). A page that was swapped out
    counts as untouched."""
    return sum(_untouched_pages(address, -(-size // mmap.PAGESIZE)) for address, size in ranges) * mmap.PAGESIZE


def _untouched_pages(address: int, pages: int) -> int:
    untouched = 0
    for first in range(0, pages, _LOOK_PAGES):
        count = min(_LOOK_PAGES, pages - first)
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
