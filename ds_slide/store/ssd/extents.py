"""Extents: where the states of a unit lie in the logical address space of the SSD store. Pure integers.

The optimizer state buffers are cut into chunks of CHUNK_NUMEL parameters; a chunk holds its part of every
state buffer one behind the other, so that a chunk is one large transfer each way. The weights' state buffer lies in one
piece before the chunks, because it is also read alone; a held gradient, which is written as a whole, in one piece
behind them. Everything starts and ends at a multiple of the 4 KiB that O_DIRECT wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_slide.store.state_buffers import StateBufferSpec

PAGE = 4096
SUM_BYTES = 4
"""Bytes of the checksum that is kept of every page (`ds_slide.store.ssd.page_sums`)."""
# What an I/O engine takes (csrc/io/engine.cpp): requests at all mounts together, and bytes of one.
MOST_DEPTH, MOST_REQUEST_BYTES = 4096, 1 << 30
# 80 MiB of fp32 states: 13 ms of a 6 GB/s disk and 1.4 ms of CPU update. Large enough that what Python does for a
# chunk (about 0.2 ms) hides behind both, small enough that 16 of them, 1.3 GB, keep reads, updates and writes apart.
CHUNK_NUMEL = 1 << 23


def whole_pages(nbytes: int) -> int:
    """Smallest multiple of a page that is not below `nbytes`."""
    return -(-nbytes // PAGE) * PAGE


def sum_table_bytes(nbytes: int) -> int:
    """Bytes of the checksums of so many bytes on SSD, a multiple of a page."""
    return nbytes // PAGE * SUM_BYTES


@dataclass(frozen=True)
class Chunk:
    """The optimizer states of the parameters `span` of a unit. `starts`: first byte of each state buffer within it, by
    name."""

    span: slice
    offset: int
    nbytes: int
    starts: dict[str, int]


@dataclass(frozen=True)
class UnitExtents:
    """Where a unit lies on SSD. `weight_offset`: of the weights' state buffer, None while weights are in memory;
    `gradient_offset`: of the held gradient, likewise. `chunks`: empty while optimizer states are."""

    weight_offset: int | None
    weight_bytes: int
    chunks: tuple[Chunk, ...]
    gradient_offset: int | None
    end: int

    @property
    def weight_pages(self) -> int:
        """Bytes of a buffer for the weights' state buffer."""
        return whole_pages(self.weight_bytes)

    def what_lies_at(self, offset: int) -> str:
        """What a byte within these extents belongs to, for messages."""
        if self.gradient_offset is not None and offset >= self.gradient_offset:
            return "the held gradient"
        found = [index for index, chunk in enumerate(self.chunks) if chunk.offset <= offset]
        return f"chunk {found[-1]} of the optimizer states" if found else "the weights"


def chunk_bytes(specs: Sequence[StateBufferSpec], numel: int) -> int:
    """Bytes of a chunk of `numel` parameters."""
    return sum(whole_pages(spec.nbytes(numel)) for spec in specs)


def chunk_spans(numel: int, chunk_numel: int) -> list[slice]:
    """The runs of parameters that [0, numel) is cut into."""
    return [slice(start, min(start + chunk_numel, numel)) for start in range(0, numel, chunk_numel)]


def unit_extents(
    start: int,
    specs: Sequence[StateBufferSpec],
    *,
    weight_bytes: int,
    chunks_of: int,
    chunk_numel: int,
    gradient_bytes: int = 0,
) -> UnitExtents:
    """Extents from byte `start` on, a multiple of a page.

    `weight_bytes`: of the whole weights' state buffer, 0 to leave weights in memory. `chunks_of`: trainable parameters
    whose optimizer states go to SSD, 0 to leave them in memory. `gradient_bytes`: of the held gradient, 0 where it is
    not on SSD.
    """
    # A chunk's part of the weights' state buffer is written, and that of a held gradient read, by itself: 2 bytes a
    # parameter at least.
    assert chunk_numel * 2 % PAGE == 0, f"chunks of {chunk_numel} parameters do not begin at whole pages"
    offset = start + whole_pages(weight_bytes)
    chunks = []
    for span in chunk_spans(chunks_of, chunk_numel):
        starts, nbytes = {}, 0
        for spec in specs:
            starts[spec.name] = nbytes
            nbytes += whole_pages(spec.nbytes(span.stop - span.start))
        chunks.append(Chunk(span, offset, nbytes, starts))
        offset += nbytes
    gradient = offset if gradient_bytes else None
    end = offset + whole_pages(gradient_bytes)
    return UnitExtents(start if weight_bytes else None, weight_bytes, tuple(chunks), gradient, end)
