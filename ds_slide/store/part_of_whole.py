"""State buffers of weights that every rank has whole on its GPU, where each updates all of them by itself.

Readers and writers from outside have this rank's part in the unit's local layout, as of any other unit. Who writes is
followed by a gather of all parts, which makes the others' copies the same again (`SlideRuntime.weights_changed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ds_slide.model.layout import UnitLayout, pieces
from ds_slide.store.in_memory import WeightsOnGpu
from ds_slide.store.tiers import Tier


@dataclass(frozen=True, eq=False)
class PartOfWhole:
    """A `StateBuffer`. What pads the part is zero, and cannot be written."""

    tensor: torch.Tensor
    """All ranks' parts, in slot layout."""
    numel: int
    """Elements of this rank's part."""
    places: Sequence[tuple[slice, int]]
    """Items of the part, and where they begin in `tensor`, ascending."""
    tier: Tier = "gpu"

    @classmethod
    def of(cls, tensor: torch.Tensor, layout: UnitLayout, rank: int) -> PartOfWhole:
        own = [(part, place.start) for owner, part, place in pieces(layout) if owner == rank]
        return cls(tensor, layout.local_numel, sorted(own, key=lambda each: each[0].start))

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def view(self, items: slice) -> torch.Tensor:
        """The first run of `items`, which are of one parameter; without what pads them."""
        return next((there for _, there in self._runs(items)), self.tensor[:0])

    def read(self, items: slice) -> torch.Tensor:
        runs = list(self._runs(items))
        if runs and runs[0][1].numel() == items.stop - items.start:
            return runs[0][1]
        values = self.tensor.new_zeros(items.stop - items.start)
        for where, there in runs:
            values[where].copy_(there)
        return values

    def write(self, items: slice, values: torch.Tensor) -> None:
        for where, there in self._runs(items):
            there.copy_(values[where])

    def _runs(self, items: slice) -> Iterator[tuple[slice, torch.Tensor]]:
        """Where in `items` each run of elements is, and a view of them."""
        for part, place in self.places:
            first, last = max(part.start, items.start), min(part.stop, items.stop)
            if first < last:
                begin = place + first - part.start
                yield slice(first - items.start, last - items.start), self.tensor[begin : begin + last - first]


@dataclass(frozen=True)
class PartOfWeightsOnGpu(WeightsOnGpu):
    """`Weights` of which every rank has all."""

    buffer: PartOfWhole  # type: ignore[assignment]

    @contextmanager
    def to_fill(self) -> Iterator[torch.Tensor]:
        values = self.buffer.tensor.new_zeros(self.buffer.numel)
        yield values
        self.buffer.write(slice(0, self.buffer.numel), values)
