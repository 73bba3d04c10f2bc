"""States on SSD: the parts of a unit that are in the state file, behind the interface of `ds_slide.store.tiers`.

States for an update or the GPU are read into pooled host buffers and written back from there. `Buffers`, which the
runtime implements (`ds_slide.runtime.ssd.buffers`), hands them out. Readers and checkpoints also read and write one
state buffer at a time, in pieces.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import torch

from ds_slide.report.statistics import LaneMeter
from ds_slide.report.trace import Requests
from ds_slide.store.ssd.extents import PAGE, Chunk, whole_pages
from ds_slide.store.ssd.files import TransferPart
from ds_slide.store.ssd.store import SsdStore
from ds_slide.store.state_buffers import StateBufferSpec
from ds_slide.store.tiers import Held, Lessee, OptimizerStates, StateBuffer, StateLease, Tier, Weights

ChunkKey = tuple[int, int]
"""(index of the unit, number of the chunk)"""
# The most bytes that readers and checkpoints transfer at once: 64 MiB keep the disk busy and are small beside a block.
BOUNCE_BYTES = 64 << 20
Key = TypeVar("Key", contravariant=True)


class Buffers(Protocol[Key]):
    """Host buffers in front of the SSD. Everything is called from any thread."""

    def reserve(self, key: Key, count: int) -> None: ...
    def take(
        self,
        key: Key,
        use: Callable[[torch.Tensor], None],
        *,
        urgent: bool,
        update: Lessee | None = None,
        reserved: bool = False,
    ) -> None: ...
    def end_load(self, key: Key) -> None: ...
    def held(self, key: Key) -> AbstractContextManager[torch.Tensor]: ...
    def press(self, key: Key) -> None: ...
    def begin_write(self, key: Key) -> torch.Tensor: ...
    def end_write(self, key: Key) -> None: ...
    def release(self, key: Key) -> None: ...
    def hurry(self) -> AbstractContextManager[None]: ...
    def forget(self, keys: Sequence[Key]) -> None: ...


def page_buffer(nbytes: int) -> torch.Tensor:
    """Return a page-aligned uint8 tensor of whole pages for `nbytes` bytes. It owns its memory."""
    from ds_slide import _native

    size = whole_pages(nbytes)
    return torch.frombuffer(_native.Slab(size, False, False).memory, dtype=torch.uint8, count=size)


def _bounce(offset: int, nbytes: int) -> tuple[TransferPart, torch.Tensor, torch.Tensor]:
    """Return the transfer of the whole pages around `nbytes` bytes at `offset`, its buffer, and a view of these
    bytes."""
    first = offset // PAGE * PAGE
    buffer = page_buffer(offset + nbytes - first)
    part = TransferPart(first, buffer.data_ptr(), buffer.numel())
    return part, buffer, buffer[offset - first : offset - first + nbytes]


@dataclass(frozen=True)
class OnSsd:
    """A `StateBuffer` in pieces of `per_piece` items, the last one shorter, at `offsets` in the store. Transfers of
    whole chunks and weights do not use it, so none of its bytes may be in such a transfer."""

    store: SsdStore
    dtype: torch.dtype
    numel: int
    per_piece: int
    offsets: Sequence[int]
    tier: Tier = "ssd"
    tensor: None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def view(self, items: slice) -> None:  # noqa: ARG002
        return None

    def read(self, items: slice) -> torch.Tensor:
        """Return a new tensor."""
        out = torch.empty(items.stop - items.start, dtype=self.dtype)
        flat = out.view(torch.uint8)
        for at, offset, nbytes in self._runs(items, BOUNCE_BYTES):
            part, _, values = _bounce(offset, nbytes)
            self.store.read_now([part])
            flat[at : at + nbytes].copy_(values)
        return out

    def write(self, items: slice, values: torch.Tensor) -> None:
        """Write items. The bytes around them in their pages are read first and kept."""
        flat = values.detach().to(device="cpu", dtype=self.dtype).contiguous().view(-1).view(torch.uint8)
        for at, offset, nbytes in self._runs(items, BOUNCE_BYTES):
            part, buffer, inner = _bounce(offset, nbytes)
            if inner.numel() != buffer.numel():
                self.store.read_now([part])
            inner.copy_(flat[at : at + nbytes])
            self.store.write_now([part])

    def transfers(self, buffer_bytes: int) -> Iterator[tuple[slice, int]]:
        """Yield (bytes of the state buffer, offset of their transfer in the store), until all bytes are covered.
        `buffer_bytes`: bytes of a buffer, whole pages. The bytes are at its beginning, and the rest of the last page is
        unused."""
        for at, offset, nbytes in self._runs(slice(0, self.numel), buffer_bytes):
            yield slice(at, at + nbytes), offset

    def _runs(self, items: slice, most_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (byte in `items`, byte offset in the store, bytes) of spans in one piece, of at most `most_bytes`."""
        size, item = self.dtype.itemsize, items.start
        while item < items.stop:
            piece, within = divmod(item, self.per_piece)
            last = min(items.stop, item + most_bytes // size, (piece + 1) * self.per_piece)
            yield (item - items.start) * size, self.offsets[piece] + within * size, (last - item) * size
            item = last


def in_one_piece(store: SsdStore, dtype: torch.dtype, numel: int, offset: int) -> OnSsd:
    """Return a state buffer that lies in one piece: weights or a held gradient."""
    return OnSsd(store, dtype, numel, numel, (offset,))


@dataclass(frozen=True)
class SsdWeights(Weights):
    """`Weights` on SSD. `order`: the unit's index. `buffers` hold the weights of whole units, by index. `urgent`:
    updates may displace weights that the GPU needs soon."""

    order: int
    buffer: OnSsd
    buffers: Buffers[int]
    urgent: bool
    requests: Requests

    def load(self, buffer: torch.Tensor) -> None:
        """Read all weights into `buffer`, which belongs to the transfer until `end_load`. The GPU waits for them."""
        whole = self._part(slice(0, self.buffer.numel), buffer)
        end = functools.partial(self.buffers.end_load, self.order)
        then = self.requests.around("weights read", self.order, buffer.nbytes, end)
        self.buffer.store.read([whole], then, urgent=True)

    def reserve(self, count: int) -> None:
        self.buffers.reserve(self.order, count)

    def lease(self, lease: StateLease, *, reserved: bool) -> None:
        take = self.buffers.take
        take(self.order, lease.have_weights, urgent=self.urgent, update=lease.update, reserved=reserved)

    def leased(self, buffer: torch.Tensor | None) -> torch.Tensor:
        """Return a view of the weights in a buffer that holds them."""
        assert buffer is not None
        return buffer[: self.buffer.numel * self.buffer.dtype.itemsize].view(self.buffer.dtype)

    def put_back(self, span: slice) -> None:
        """Write the updated `span`, which starts at a whole page."""
        buffer = self.buffers.begin_write(self.order)
        self.buffers.release(self.order)
        nbytes = (span.stop - span.start) * self.buffer.dtype.itemsize
        end = functools.partial(self.buffers.end_write, self.order)
        then = self.requests.around("weights written", self.order, nbytes, end)
        self.buffer.store.write([self._part(span, buffer)], then)

    def press(self) -> None:
        """Let these weights go before weights that the GPU needs soon, because the GPU may wait for this update."""
        self.buffers.press(self.order)

    @contextmanager
    def for_upload(self) -> Iterator[torch.Tensor]:
        with self.buffers.held(self.order) as buffer:
            yield self.leased(buffer)

    @contextmanager
    def to_fill(self) -> Iterator[torch.Tensor]:
        weight = self.leased(page_buffer(self.buffer.numel * self.buffer.dtype.itemsize))
        yield weight
        self.buffer.write(slice(0, weight.numel()), weight)

    def hurry(self) -> AbstractContextManager[None]:
        return self.buffers.hurry()

    def drain(self) -> None:
        self.buffers.forget([self.order])

    def _part(self, span: slice, buffer: torch.Tensor) -> TransferPart:
        size, (offset,) = self.buffer.dtype.itemsize, self.buffer.offsets
        start, stop = span.start * size, span.stop * size
        return TransferPart(offset + start, buffer.data_ptr() + start, whole_pages(stop - start))


@dataclass(frozen=True)
class SsdOptimizerStates(OptimizerStates):
    """`OptimizerStates` on SSD, in `chunks`. `order`: the unit's index. `weight_buffers`: the buffers of all units'
    weights, which an update takes first."""

    order: int
    store: SsdStore
    specs: Sequence[StateBufferSpec]
    chunks: Sequence[Chunk]
    chunk_buffers: Buffers[ChunkKey]
    weight_buffers: Buffers[int]
    requests: Requests

    @cached_property
    def buffers(self) -> Mapping[str, StateBuffer]:  # type: ignore[override]
        return {spec.name: self._buffer(spec) for spec in self.specs}

    def load(self, index: int, buffer: torch.Tensor) -> None:
        """Read chunk `index`. The buffer belongs to the transfer until `end_load`."""
        end = functools.partial(self.chunk_buffers.end_load, (self.order, index))
        self.store.read(self._part(index, buffer), self.requests.around("states read", self.order, buffer.nbytes, end))

    def spans(self, wanted: Sequence[slice]) -> list[slice]:  # noqa: ARG002 - a chunk is one transfer
        return [chunk.span for chunk in self.chunks]

    def lease(self, lease: StateLease) -> None:
        self.chunk_buffers.take((self.order, lease.index), lease.have_states, urgent=True, update=lease.update)

    def leased(self, index: int, buffer: torch.Tensor | None, span: slice) -> dict[str, torch.Tensor]:
        assert buffer is not None
        starts, numel = self.chunks[index].starts, span.stop - span.start
        return {
            spec.name: buffer[starts[spec.name] : starts[spec.name] + spec.nbytes(numel)].view(spec.dtype)
            for spec in self.specs
        }

    def put_back(self, index: int) -> None:
        key = (self.order, index)
        buffer = self.chunk_buffers.begin_write(key)
        self.chunk_buffers.release(key)
        end = functools.partial(self.chunk_buffers.end_write, key)
        then = self.requests.around("states written", self.order, buffer.nbytes, end)
        self.store.write(self._part(index, buffer), then)

    def hurry(self) -> AbstractContextManager[None]:
        return self.weight_buffers.hurry()

    def drain(self) -> None:
        self.chunk_buffers.forget([(self.order, index) for index in range(len(self.chunks))])

    def _part(self, index: int, buffer: torch.Tensor) -> list[TransferPart]:
        return [TransferPart(self.chunks[index].offset, buffer.data_ptr(), self.chunks[index].nbytes)]

    def _buffer(self, spec: StateBufferSpec) -> OnSsd:
        span = self.chunks[0].span
        offsets = [chunk.offset + chunk.starts[spec.name] for chunk in self.chunks]
        numel = spec.items(self.chunks[-1].span.stop)
        return OnSsd(self.store, spec.dtype, numel, spec.items(span.stop - span.start), offsets)


class GradientBuffer:
    """The one host buffer through which the update lane reads and writes held gradients on SSD. The lane waits for
    these rare transfers, which are urgent. `meter`: the meter of the update lane."""

    def __init__(self, meter: LaneMeter) -> None:
        self._meter = meter
        self.buffer = torch.empty(0, dtype=torch.uint8)
        """Whole pages for the largest held gradient, set before the first gradient arrives."""

    @contextmanager
    def disk_works(self) -> Iterator[None]:
        """Count the lane's wait as time of the disk, which the store measures, and not of the lane."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._meter.add_pause(started, time.perf_counter())


@dataclass(frozen=True)
class HeldOnSsd(Held):
    """`Held` on SSD. Values that were read stay in `through` until the lane's next call for any gradient.
    Raises SlideError when the disk fails."""

    gradient: OnSsd
    through: GradientBuffer

    @contextmanager
    def sum(self, *, first: bool) -> Iterator[torch.Tensor]:
        whole = slice(0, self.gradient.numel)
        yield self._view(whole).zero_() if first else self.load(whole)
        self.store(self.through.buffer)

    def load(self, span: slice) -> torch.Tensor:
        """Read the elements `span`, which starts at a whole page."""
        with self.through.disk_works():
            self.gradient.store.read_now([self._part(span, self.through.buffer)])
        return self._view(span)

    def store(self, buffer: torch.Tensor) -> None:
        """Write the gradient from the beginning of `buffer`, with the bytes behind it in the last page."""
        with self.through.disk_works():
            self.gradient.store.write_now([self._part(slice(0, self.gradient.numel), buffer)])

    def _view(self, span: slice) -> torch.Tensor:
        nbytes = (span.stop - span.start) * self.gradient.dtype.itemsize
        return self.through.buffer[:nbytes].view(self.gradient.dtype)

    def _part(self, span: slice, buffer: torch.Tensor) -> TransferPart:
        size, (offset,) = self.gradient.dtype.itemsize, self.gradient.offsets
        nbytes = whole_pages((span.stop - span.start) * size)
        assert nbytes <= buffer.nbytes
        return TransferPart(offset + span.start * size, buffer.data_ptr(), nbytes)
