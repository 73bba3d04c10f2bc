"""Copies between the GPU and host memory that is not page-locked, or SSD, through a page-locked buffer.

The driver copies such memory with one thread: 31 GB of states took 18 s on a machine with 16 cores and a 55 GB/s bus.
Here all update threads copy one half of the buffer while the bus copies the other one. The disk reads and writes both
halves at a time, so that it always has requests: through new tensors for each 64 MiB it reached a quarter of its rate.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from ds_slide.plan.allocations import PIECE_BYTES
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import PASSED, Marker
from ds_slide.runtime.core.futures import synchronize
from ds_slide.store.ssd.extents import PAGE, whole_pages
from ds_slide.store.ssd.files import TransferPart
from ds_slide.store.ssd.unit import OnSsd
from ds_slide.store.state import UnitState


@dataclass
class _Half:
    """One half of the buffer. Owners: the GPU's current stream from a copy until `passed`; the disk until `disk` is
    done; otherwise the thread that copies, which moves downloaded bytes to `target` before it uses the half again."""

    buffer: torch.Tensor
    passed: Marker = PASSED
    target: torch.Tensor | None = None
    disk: Future[None] | None = None


class StagedCopies:
    """Copies tensors through a page-locked buffer. Called by one thread, on one stream. A copy has ended, and its
    tensors belong to the caller again, when `finish` has been called after it."""

    def __init__(self, buffer: torch.Tensor | None, context: Context, progress: tqdm[Any]) -> None:
        """`buffer`: bytes, page-locked; None where all tensors to copy are page-locked themselves. For SSD it begins at
        a page, and has at least two pages. `progress`: shows the bytes that have been copied."""
        size = 0 if buffer is None else min(PIECE_BYTES, buffer.numel() // 2)
        size -= size % PAGE if size > PAGE else 0
        self._halves = [] if buffer is None or not size else [_Half(half) for half in buffer[: 2 * size].split(size)]
        self._context = context
        self._progress = progress
        self._disk = ThreadPoolExecutor(2, "ds_slide-moves")
        """The disk's threads, one for each half."""

    def copy_states(self, target: UnitState, source: UnitState) -> None:
        """Copy weights, states, and the last gradient where both sides hold it, and wait for the end."""
        for name in source.buffers.keys() & target.buffers.keys():
            read, written = source.buffers[name], target.buffers[name]
            if isinstance(read, OnSsd):
                self.from_ssd(written.read(slice(0, read.numel)), read)
            elif isinstance(written, OnSsd):
                self.to_ssd(written, read.read(slice(0, written.numel)))
            else:
                copy = self.to_gpu if written.tier == "gpu" else self.to_host
                copy(written.read(slice(0, read.numel)), read.read(slice(0, read.numel)))
            self._progress.update(read.numel * read.dtype.itemsize)
        self.finish()

    def to_gpu(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` ([n], in host memory) to `target` ([n], on the GPU)."""
        if self._is_direct(source):
            target.copy_(source, non_blocking=True)
            return
        target, source = target.view(torch.uint8), source.view(torch.uint8)
        for piece in self._pieces(source.numel()):
            half = self._next_half()
            staged = half.buffer[: piece.stop - piece.start]
            self._context.updater.copy_(staged, source[piece])
            target[piece].copy_(staged, non_blocking=True)
            half.passed = self._context.device.mark()

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` ([n], on the GPU) to `target` ([n], in host memory)."""
        if self._is_direct(target):
            target.copy_(source, non_blocking=True)
            return
        target, source = target.view(torch.uint8), source.view(torch.uint8)
        for piece in self._pieces(source.numel()):
            half = self._next_half()
            half.buffer[: piece.stop - piece.start].copy_(source[piece], non_blocking=True)
            half.passed, half.target = self._context.device.mark(), target[piece]

    def from_ssd(self, target: torch.Tensor, source: OnSsd) -> None:
        """Copy `source` ([n], on SSD) to `target` ([n], on the GPU)."""
        under_way: deque[tuple[torch.Tensor, _Half]] = deque()
        for span, offset in source.transfers(self._halves[0].buffer.numel()):
            half = self._next_half()
            half.disk = self._disk.submit(source.store.read_now, [_part(offset, span, half)])
            under_way.append((target.view(torch.uint8)[span], half))
            if len(under_way) == len(self._halves):
                self._upload(*under_way.popleft())
        for each in under_way:
            self._upload(*each)

    def to_ssd(self, target: OnSsd, source: torch.Tensor) -> None:
        """Copy `source` ([n], on the GPU) to `target` ([n], on SSD)."""
        for span, offset in target.transfers(self._halves[0].buffer.numel()):
            half = self._next_half()
            half.buffer[: span.stop - span.start].copy_(source.view(torch.uint8)[span], non_blocking=True)
            synchronize(self._context.failures, self._context.device.mark(), "states on their way")
            half.disk = self._disk.submit(target.store.write_now, [_part(offset, span, half)])

    def finish(self) -> None:
        """Wait until all copies have ended."""
        for _ in self._halves:
            self._next_half()
        synchronize(self._context.failures, self._context.device.mark(), "states on their way")

    def close(self) -> None:
        """Wait until neither GPU nor disk uses the buffer, also after an exception."""
        self._disk.shutdown()
        self._context.device.synchronize()

    def _is_direct(self, on_host: torch.Tensor) -> bool:
        return not self._halves or on_host.is_pinned()

    def _pieces(self, nbytes: int) -> list[slice]:
        size = self._halves[0].buffer.numel()
        return [slice(start, min(start + size, nbytes)) for start in range(0, nbytes, size)]

    def _upload(self, target: torch.Tensor, half: _Half) -> None:
        """Copy to `target` the bytes that the disk reads into `half`."""
        assert half.disk is not None
        half.disk.result()
        half.disk = None
        target.copy_(half.buffer[: target.numel()], non_blocking=True)
        half.passed = self._context.device.mark()

    def _next_half(self) -> _Half:
        """Return the least recently used half, once it is free."""
        half = self._halves.pop(0)
        self._halves.append(half)
        synchronize(self._context.failures, half.passed, "states on their way")
        if half.disk is not None:
            half.disk.result()
            half.disk = None
        if half.target is not None:
            self._context.updater.copy_(half.target, half.buffer[: half.target.numel()])
            half.target = None
        return half


def _part(offset: int, span: slice, half: _Half) -> TransferPart:
    """Return the transfer of the bytes `span` between byte `offset` of the store and the beginning of a half."""
    return TransferPart(offset, half.buffer.data_ptr(), whole_pages(span.stop - span.start))
