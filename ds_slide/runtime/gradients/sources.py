"""Where a unit's gradient lies on the GPU when it sets out for host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_slide.runtime.device import Marker
from ds_slide.runtime.transfers.handoff import Failures, Future
from ds_slide.runtime.transfers.stream_worker import StreamWorker
from ds_slide.runtime.unit import Unit

SquareSum = Callable[[torch.Tensor], torch.Tensor]


def collect(unit: Unit, state_buffer: torch.Tensor, *, accumulate: bool) -> torch.Tensor | None:
    """Copy or add the parameters' gradients into a flat state buffer of one rank ([>= trainable_numel]).

    The square sum of what the state buffer then holds, [] fp64, where the same pass gives it (on a GPU); else None.
    """
    state_buffer = state_buffer[: unit.layout.trainable_numel]
    if state_buffer.is_cuda:
        return collect_in_one_pass(unit, state_buffer, accumulate=accumulate)
    collect_by_torch(unit, state_buffer, accumulate=accumulate)
    return None


def collect_in_one_pass(unit: Unit, state_buffer: torch.Tensor, *, accumulate: bool) -> torch.Tensor:
    """`collect` by the GPU kernel, which also writes the alignment gaps and the parts of unused parameters."""
    from ds_slide.kernels.offload.gradient_pack import pack_gradients

    square_sum = torch.empty((), dtype=torch.float64, device=state_buffer.device)
    offsets = [entry.offset for _, entry in unit.trainable]
    pack_gradients(unit.gradients(), state_buffer, offsets, square_sum, accumulate=accumulate)
    return square_sum


def collect_by_torch(unit: Unit, state_buffer: torch.Tensor, *, accumulate: bool) -> None:
    """`collect` without a GPU; the bits are the same."""
    given = [(entry, flat) for (_, entry), flat in zip(unit.trainable, unit.gradients(), strict=True)]
    sources = [flat for _, flat in given if flat is not None]
    if not accumulate and sum(flat.numel() for flat in sources) != state_buffer.numel():
        state_buffer.zero_()  # alignment gaps and unused parameters
    targets = [state_buffer[entry.offset : entry.offset + entry.numel] for entry, flat in given if flat is not None]
    if targets:
        (torch._foreach_add_ if accumulate else torch._foreach_copy_)(targets, sources)


class Source(Protocol):
    """`square_sum` is called by the compute thread, the rest by the d2h lane, on its stream."""

    def square_sum(self, of_flat: SquareSum) -> torch.Tensor: ...

    def parts(self, span: slice) -> Iterator[slice]:
        """What `span` is made of, each when it can be copied; it has been copied when the next is asked for."""

    def copy(self, part: slice, target: torch.Tensor) -> None:
        """To `target`, which has its elements alone."""

    def release(self, after: Marker) -> None: ...


class Staging:
    """A flat GPU buffer, of bytes, for one unit's gradient. Owners: the compute stream while it packs, the collectives
    stream while it reduces (several ranks), then the d2h lane until `free` is kept; a GPU-tier unit's gradient is
    copied, and `free` kept, by the collectives stream itself. Whoever takes it next waits for `free` on its own
    stream."""

    def __init__(self, packed: torch.Tensor, own: torch.Tensor, failures: Failures) -> None:
        self.packed = packed
        """[world_size * trainable_numel] elements of the largest unit, rank-major."""
        self.own = own
        """[trainable_numel] elements of the largest unit; the same memory as `packed` for one rank."""
        self.free = Future.kept(failures)


@dataclass(frozen=True)
class Packed:
    """A block's gradient in a staging buffer."""

    free: Future
    """Kept when the staging buffer is given back: `Staging.free` is the next user's by then."""
    own: torch.Tensor
    """[trainable_numel], a view of the staging buffer."""
    summed: torch.Tensor | None
    """[] fp64, its square sum, where packing gave it."""

    def square_sum(self, of_flat: SquareSum) -> torch.Tensor:
        return of_flat(self.own) if self.summed is None else self.summed

    def parts(self, span: slice) -> Iterator[slice]:
        yield span

    def copy(self, span: slice, target: torch.Tensor) -> None:
        target.copy_(self.own[span], non_blocking=True)

    def release(self, after: Marker) -> None:
        self.free.keep(after)


@dataclass
class Scattered:
    """An outer module's gradients as autograd left them; held here until the d2h lane has copied them."""

    places: list[tuple[int, int, torch.Tensor | None]]
    """(start, numel, flat gradient or None for zero) in the order of the state buffer."""

    @classmethod
    def of(cls, unit: Unit, d2h: StreamWorker) -> Scattered:
        places: list[tuple[int, int, torch.Tensor | None]] = []
        for (_, entry), flat in zip(unit.trainable, unit.gradients(), strict=True):
            if flat is not None and flat.is_cuda:
                # Freed before the copy has run, its memory must not be handed to the compute stream yet.
                flat.record_stream(d2h.stream)
            places.append((entry.offset, entry.numel, flat))
        return cls(places)

    def square_sum(self, of_flat: SquareSum) -> torch.Tensor:
        sums = [of_flat(flat) for _, _, flat in self.places if flat is not None]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)

    def parts(self, span: slice) -> Iterator[slice]:
        yield span

    def copy(self, span: slice, target: torch.Tensor) -> None:
        for start, numel, flat in self.places:
            first, last = max(start, span.start), min(start + numel, span.stop)
            if first >= last:
                continue
            part = target[first - span.start : last - span.start]
            if flat is None:
                part.zero_()
            else:
                part.copy_(flat[first - start : last - start], non_blocking=True)

    def release(self, after: Marker) -> None:  # noqa: ARG002 - the allocator knows of the stream: see `of`
        self.places = []
