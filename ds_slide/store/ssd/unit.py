"""One unit's states on SSD: transfers of its chunks and weights, and piecewise access to a single state buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ds_slide.store.ssd.extents import PAGE, UnitExtents, whole_pages
from ds_slide.store.ssd.store import Part, SsdStore
from ds_slide.store.state_buffers import StateBuffers, StateBufferSpec

Then = Callable[[], None]
# Of one state buffer at a time, for readers and checkpoints: 64 MiB keep the disk busy and are small beside one block.
BOUNCE_BYTES = 64 << 20


def page_buffer(nbytes: int) -> torch.Tensor:
    """uint8 tensor of whole pages for `nbytes` bytes, page aligned, freed with the tensor."""
    from ds_slide import _native

    size = whole_pages(nbytes)
    return torch.frombuffer(_native.Slab(size, False, False), dtype=torch.uint8, count=size)


def _bounce(offset: int, nbytes: int) -> tuple[Part, torch.Tensor, torch.Tensor]:
    """(transfer of the whole pages around `nbytes` bytes at `offset`, its buffer, the view of these bytes in it)."""
    first = offset // PAGE * PAGE
    buffer = page_buffer(offset + nbytes - first)
    return Part(first, buffer.data_ptr(), buffer.numel()), buffer, buffer[offset - first : offset - first + nbytes]


@dataclass(frozen=True)
class SsdUnit:
    """`specs`: the optimizer state buffers. `weight_dtype`, `gradient_dtype`: of the weights' state buffer and the held
    gradient. Buffers are flat, in whole pages, and owned by the transfer from the call until `then`."""

    store: SsdStore
    extents: UnitExtents
    specs: Sequence[StateBufferSpec]
    weight_dtype: torch.dtype
    gradient_dtype: torch.dtype | None = None

    @property
    def has_weight(self) -> bool:
        return self.extents.weight_offset is not None

    @property
    def has_chunks(self) -> bool:
        return bool(self.extents.chunks)

    @property
    def has_gradient(self) -> bool:
        return self.extents.gradient_offset is not None

    def dtype_of(self, name: str) -> torch.dtype:
        """Of a state buffer ("weight", "gradient" or the name of a spec)."""
        return self._geometry(name)[0]

    # ---- whole chunks and weights, asynchronously
    # -----------------------------------------------------------------------

    def load_chunk(self, index: int, buffer: torch.Tensor, then: Then) -> None:
        chunk = self.extents.chunks[index]
        self.store.read([Part(chunk.offset, buffer.data_ptr(), chunk.nbytes)], then)

    def store_chunk(self, index: int, buffer: torch.Tensor, then: Then) -> None:
        chunk = self.extents.chunks[index]
        self.store.write([Part(chunk.offset, buffer.data_ptr(), chunk.nbytes)], then)

    def load_weight(self, buffer: torch.Tensor, then: Then) -> None:
        """Urgent: the GPU waits for it."""
        self.store.read([self._weight_part(slice(0, self.extents.weight_bytes), buffer)], then, urgent=True)

    def store_weight(self, span: slice, buffer: torch.Tensor, then: Then) -> None:
        """The parameters `span`, which starts at a whole page, of the weights' state buffer in `buffer`."""
        size = self.weight_dtype.itemsize
        self.store.write([self._weight_part(slice(span.start * size, span.stop * size), buffer)], then)

    def state_buffers(self, index: int, buffer: torch.Tensor, weight: torch.Tensor) -> StateBuffers:
        """Views of chunk `index` in its buffer, with `weight`: the chunk's part of the weights' state
        buffer."""
        chunk = self.extents.chunks[index]
        numel = chunk.span.stop - chunk.span.start
        views = {
            spec.name: buffer[chunk.starts[spec.name] : chunk.starts[spec.name] + spec.nbytes(numel)].view(spec.dtype)
            for spec in self.specs
        }
        return StateBuffers(weight, views)

    def weight_view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The weights' state buffer in a buffer that it was loaded into."""
        return buffer[: self.extents.weight_bytes].view(self.weight_dtype)

    def _weight_part(self, span: slice, buffer: torch.Tensor) -> Part:
        assert self.extents.weight_offset is not None
        nbytes = whole_pages(span.stop - span.start)
        return Part(self.extents.weight_offset + span.start, buffer.data_ptr() + span.start, nbytes)

    # ---- parts of a held gradient, blocking --------------------------------------------------------------------------

    def read_gradient_now(self, span: slice, buffer: torch.Tensor) -> None:
        """The elements `span`, which starts at a whole page, to the beginning of `buffer`."""
        self.store.read_now([self._gradient_part(span, buffer)])

    def write_gradient_now(self, span: slice, buffer: torch.Tensor) -> None:
        """As `read_gradient_now`, from `buffer`; the rest of the last page is written with what lies there."""
        self.store.write_now([self._gradient_part(span, buffer)])

    def _gradient_part(self, span: slice, buffer: torch.Tensor) -> Part:
        assert self.extents.gradient_offset is not None and self.gradient_dtype is not None
        size = self.gradient_dtype.itemsize
        nbytes = whole_pages((span.stop - span.start) * size)
        assert nbytes <= buffer.numel() * buffer.element_size()
        return Part(self.extents.gradient_offset + span.start * size, buffer.data_ptr(), nbytes)

    # ---- one state buffer, blocking, for readers and checkpoints
    # ---------------------------------------------------------

    def read(self, name: str, items: slice) -> torch.Tensor:
        """A new tensor with the items `items` of a state buffer ("weight", "gradient" or the name of a spec)."""
        dtype, per_chunk = self._geometry(name)
        out = torch.empty(items.stop - items.start, dtype=dtype)
        flat = out.view(torch.uint8)
        for at, offset, nbytes in self._runs(name, dtype, per_chunk, items):
            part, _, values = _bounce(offset, nbytes)
            self.store.read_now([part])
            flat[at : at + nbytes].copy_(values)
        return out

    def write(self, name: str, items: slice, values: torch.Tensor) -> None:
        """Set the items `items` of a state buffer; what lies around them in their pages is read first and kept."""
        dtype, per_chunk = self._geometry(name)
        flat = values.detach().to(device="cpu", dtype=dtype).contiguous().view(-1).view(torch.uint8)
        for at, offset, nbytes in self._runs(name, dtype, per_chunk, items):
            part, buffer, inner = _bounce(offset, nbytes)
            if inner.numel() != buffer.numel():
                self.store.read_now([part])
            inner.copy_(flat[at : at + nbytes])
            self.store.write_now([part])

    def _geometry(self, name: str) -> tuple[torch.dtype, int]:
        """(dtype, items of a whole chunk; 0 for weights and gradients, which are in one piece)."""
        if name == "weight":
            return self.weight_dtype, 0
        if name == "gradient":
            assert self.gradient_dtype is not None
            return self.gradient_dtype, 0
        spec = next(spec for spec in self.specs if spec.name == name)
        span = self.extents.chunks[0].span
        return spec.dtype, spec.items(span.stop - span.start)

    def _runs(self, name: str, dtype: torch.dtype, per_chunk: int, items: slice) -> Iterator[tuple[int, int, int]]:
        """(byte in `items`, logical byte offset, bytes) of runs that lie in one piece, of BOUNCE_BYTES at most."""
        size, item = dtype.itemsize, items.start
        piece = self.extents.gradient_offset if name == "gradient" else self.extents.weight_offset
        while item < items.stop:
            last = min(items.stop, item + BOUNCE_BYTES // size)
            if per_chunk:
                chunk = self.extents.chunks[item // per_chunk]
                offset = chunk.offset + chunk.starts[name] + (item % per_chunk) * size
                last = min(last, (item // per_chunk + 1) * per_chunk)
            else:
                assert piece is not None
                offset = piece + item * size
            yield (item - items.start) * size, offset, (last - item) * size
            item = last
