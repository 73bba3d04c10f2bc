"""Numbers that the ranks of one machine read in each other's memory, without a collective and without the GPU.

A board is a memory file that all ranks map. Each rank has a row of numbers and a line of text, which it alone writes;
rank 0 has more numbers after the rows. A waiting thread sleeps in the kernel until any rank has published something.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.ranks.sharing import share
from ds_slide.store.memory_file import MemoryFile, Range, map_bytes

TEXT_BYTES = 240
"""Bytes of a line of text: the name of a block and what is done with it."""
MASK = (1 << 32) - 1


class Board:
    """One rank's view of the board. `width`: numbers in a row. A rank that sees a publication sees everything written
    before it."""

    def __init__(self, words: Any, texts: mmap.mmap, rank: int, world_size: int, width: int) -> None:
        """Make a view. `words`: the counters of all ranks (`_native.Generations`). `texts`: a line of the same length
        for each."""
        self._words = words
        self._texts = texts
        self._text_bytes = len(texts) // world_size
        self._width = width
        self._own = rank * width
        self._more = world_size * width
        self.rank = rank
        self.others = [other for other in range(world_size) if other != rank]

    def get(self, rank: int, item: int) -> int:
        return int(self._words.value(rank * self._width + item))

    def put(self, item: int, value: int) -> None:
        """Write a number of this rank's row. Other ranks may see it late."""
        self._words.store(self._own + item, value & MASK)

    def publish(self, item: int, value: int) -> None:
        """Write a number of this rank's row, and wake all waiting ranks."""
        self._words.publish(self._own + item, value & MASK)

    def get_more(self, item: int) -> int:
        """Return a number after the rows."""
        return int(self._words.value(self._more + item))

    def put_more(self, item: int, value: int) -> None:
        """Write a number after the rows. Other ranks may see it late. Only rank 0 calls this."""
        self._words.store(self._more + item, value & MASK)

    def publish_more(self, item: int, value: int) -> None:
        """Write a number after the rows, and wake all waiting ranks. Only rank 0 calls this."""
        self._words.publish(self._more + item, value & MASK)

    def write_text(self, text: str) -> None:
        """Write the line of this rank. A rank that sees the next publication sees the line."""
        start, nbytes = self.rank * self._text_bytes, self._text_bytes
        self._texts[start : start + nbytes] = text.encode()[:nbytes].ljust(nbytes, b"\0")

    def text(self, rank: int) -> str:
        line = self._texts[rank * self._text_bytes : (rank + 1) * self._text_bytes]
        return line.rstrip(b"\0").decode(errors="replace")

    def until(self, ready: Callable[[], bool], failures: Failures, what: str) -> None:
        """Wait for other ranks until `ready()`, which may do work. Raises SlideError when a lane has failed."""
        if ready():
            return
        with failures.waiting(what, self._words.poke, for_ranks=True):
            while True:
                seen = self._words.changes()  # before `ready()`: a later change ends the sleep
                failures.raise_first()
                if ready():
                    break
                self._words.wait_change(seen)
        failures.progressed()


def open_board(ranks: Ranks, width: int, more: int = 0, text_bytes: int = TEXT_BYTES) -> Board | None:
    """Return a board of zeros with `more` numbers after its rows. Returns None on all ranks where one of them cannot
    map the memory of rank 0, as on several machines. Collective."""
    sharing = share(ranks)
    if sharing is None:
        return None
    try:
        count = ranks.world_size * width + more
        made = ranks.exchange(_appended(sharing.file, ranks, count, text_bytes), "making a board of the ranks")[0]
        descriptor = sharing.descriptors[0] if ranks.rank else sharing.file.descriptor
        board = None if made is None else _mapped(descriptor, made, ranks, width, count)
        seen = ranks.exchange(board is not None, "mapping the board of the ranks")
    finally:
        sharing.close()
    return board if all(seen) else None


def _appended(file: MemoryFile, ranks: Ranks, count: int, text_bytes: int) -> tuple[Range, Range] | None:
    """Return the places of numbers and texts in the file of rank 0."""
    from ds_slide import _native

    if ranks.rank:
        return None
    try:
        return file.append(_native.Generations.bytes(count)), file.append(ranks.world_size * text_bytes)
    except OSError:
        return None


def _mapped(descriptor: int, made: tuple[Range, Range], ranks: Ranks, width: int, count: int) -> Board | None:
    from ds_slide import _native

    words, texts = made
    try:
        counters = _native.Generations(map_bytes(descriptor, words), count)
        lines = mmap.mmap(descriptor, texts.nbytes, offset=texts.offset)
    except (OSError, RuntimeError, ValueError):
        return None
    return Board(counters, lines, ranks.rank, ranks.world_size, width)
