"""The place of a unit's gradient on the GPU before its copy to host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_slide.compression.codec import GradientSpan, square_sum
from ds_slide.runtime.core.device import Device, Marker
from ds_slide.runtime.core.futures import Failures, Future
from ds_slide.runtime.core.lanes import StreamWorker
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.unit import Unit


class GradientSource(Protocol):
    """The gradient of a unit on the GPU. `square_sum` is called by the compute thread, the rest by the d2h lane,
    on its stream."""

    def square_sum(self) -> torch.Tensor: ...

    def parts(self, span: slice) -> Iterator[slice]:
        """Yield the parts of `span`, each when it can be copied. The caller has copied a part before it asks for the
        next one."""

    def copy(self, part: slice, target: torch.Tensor) -> None:
        """Copy `part` to `target`, which has the elements of the part alone."""

    def release(self, after: Marker) -> None: ...


class Staging:
    """A flat GPU buffer, of bytes, for one unit's gradient. Owners: the compute stream while it packs, the collectives
    stream while it reduces (several ranks), then the d2h lane until `free` is complete. The collectives stream itself
    copies a GPU-tier unit's gradient and keeps `free`. The next user waits for `free` on its own stream."""

    def __init__(self, packed: torch.Tensor, own: torch.Tensor, failures: Failures) -> None:
        self.packed = packed
        """[world_size * numel] elements of the largest packed gradient, rank-major."""
        self.own = own
        """[numel] elements of the largest encoded gradient; the same memory as `packed` for one rank."""
        self.free = Future.completed(failures)


@dataclass
class _Flat:
    """A gradient in one flat buffer, encoded by its codec."""

    own: torch.Tensor
    """[numel]"""
    summed: torch.Tensor | None
    """[] fp64, its square sum, where it is known."""

    def square_sum(self) -> torch.Tensor:
        return square_sum(self.own) if self.summed is None else self.summed

    def parts(self, span: slice) -> Iterator[slice]:
        yield span

    def copy(self, span: slice, target: torch.Tensor) -> None:
        target.copy_(self.own[span], non_blocking=True)


@dataclass
class Packed(_Flat):
    """A block's gradient in a staging buffer."""

    free: Future
    """Completed when the staging buffer is given back. `Staging.free` may be the next user's by then."""

    def release(self, after: Marker) -> None:
        self.free.complete(after)


class GpuSum(_Flat):
    """The sum of a unit's gradients in its buffer (`GradientStatus.gpu_sum`). The next gradient there waits until this
    one has arrived."""

    def release(self, after: Marker) -> None:  # noqa: ARG002 - the unit keeps the buffer until the copy has run
        self.own = self.own.new_empty(0)


class Averaged(_Flat):
    """This rank's part of an outer module's gradient, which the ranks averaged from where autograd left it.

    Owners of that gradient: autograd on the compute stream, and then the collectives stream. That only reads it,
    because a client's hook may hold it. Owners of `own`: the collectives stream while it averages and
    squares, then the d2h lane until `release`. The collectives stream itself copies a GPU-tier unit's gradient.

    Both are tensors of the compute stream. Python drops them before the GPU has run what uses them: the gradient when
    its collective is issued, `own` in `release`. So the allocator is told of the streams that use them. It gives the
    memory to the compute stream again only when these streams have come to the drop."""

    @classmethod
    def of(cls, unit: Unit, device: Device, ranks: Ranks, d2h: StreamWorker) -> Averaged:
        """Average the gradient of the unit over the ranks. The compute stream does not wait for it."""
        codec, flat = unit.codec, unit.codec.in_place_for_ranks(unit.gradients())
        own = torch.empty(codec.numel, dtype=codec.dtype, device=device.torch)
        if flat is None:  # other ranks may have a gradient
            flat = own.new_zeros(ranks.world_size * codec.numel, dtype=unit.dtype)
        ranks.keep(flat, own)
        if own.is_cuda:
            own.record_stream(d2h.stream)
        ranks.reduce_in_place(unit.name, flat, own, device.mark())
        return cls(own, None)

    @property
    def nbytes(self) -> int:
        """Bytes of `own`; 0 once it has been copied."""
        return self.own.nbytes

    def release(self, after: Marker) -> None:  # noqa: ARG002 - the allocator knows of the streams: see above
        self.own = self.own.new_empty(0)


@dataclass
class Scattered:
    """An outer module's gradients as autograd left them; held here until the d2h lane has copied them."""

    places: list[GradientSpan]

    @classmethod
    def of(cls, unit: Unit, d2h: StreamWorker) -> Scattered:
        places = unit.codec.encode_in_place(unit.gradients())
        for place in places:
            if place.flat is not None and place.flat.is_cuda:
                # Freed before the copy has run, its memory must not be handed to the compute stream yet.
                place.flat.record_stream(d2h.stream)
        return cls(places)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients; 0 once they have been copied."""
        return sum(place.flat.nbytes for place in self.places if place.flat is not None)

    def square_sum(self) -> torch.Tensor:
        sums = [square_sum(place.flat) for place in self.places if place.flat is not None]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)

    def parts(self, span: slice) -> Iterator[slice]:
        yield span

    def copy(self, span: slice, target: torch.Tensor) -> None:
        for place in self.places:
            first, last = max(place.start, span.start), min(place.start + place.numel, span.stop)
            if first >= last:
                continue
            part = target[first - span.start : last - span.start]
            if place.flat is None:
                part.zero_()
            else:
                part.copy_(place.flat[first - place.start : last - place.start], non_blocking=True)

    def release(self, after: Marker) -> None:  # noqa: ARG002 - the allocator knows of the stream: see `of`
        self.places = []
