"""States in host memory or in GPU memory, where they are updated.

Every state buffer is a flat tensor of its exact size. In host memory the weights and a held gradient are page-locked,
because the GPU copies from and to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ds_slide.model.layout import UnitLayout, pieces
from ds_slide.optim.client import UnitOptimizer
from ds_slide.store.state_buffers import StateBufferSpec, items_of
from ds_slide.store.tiers import GradientSink, Held, OptimizerStates, Tier, Weights


@dataclass(eq=False)
class InMemory:
    """A `StateBuffer`."""

    tensor: torch.Tensor
    tier: Tier = "host"
    _views: list[tuple[weakref.ref[torch.Tensor], slice]] = field(default_factory=list)
    """The views that callers of `view` may still keep, with their items."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def numel(self) -> int:
        return self.tensor.numel()

    def read(self, items: slice) -> torch.Tensor:
        return self.tensor[items]

    def write(self, items: slice, values: torch.Tensor) -> None:
        self.tensor[items].copy_(values)

    def view(self, items: slice) -> torch.Tensor:
        made = self.tensor[items]
        self._views = [each for each in self._views if each[0]() is not None] + [(weakref.ref(made), items)]
        return made

    @property
    def has_views(self) -> bool:
        """Whether a view is still in use."""
        return any(reference() is not None for reference, _ in self._views)

    def exchange(self, other: InMemory) -> None:
        """Exchange the memory of two buffers and of the views of them. Called by the owner of both."""
        self.tensor, other.tensor = other.tensor, self.tensor
        for buffer in (self, other):
            for reference, items in buffer._views:
                if (view := reference()) is not None:
                    # Not `view.data`, which a subclass may have made a way to write to the weights.
                    torch.Tensor.data.__set__(view, buffer.tensor[items])  # type: ignore[attr-defined]


@dataclass(frozen=True)
class WeightsInMemory(Weights):
    """`Weights` in host memory."""

    buffer: InMemory | PartOfWhole

    def leased(self, buffer: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002 - they are always there
        return self.buffer.tensor


@dataclass(frozen=True)
class WeightsOnGpu(WeightsInMemory):
    """`Weights` that are updated on the GPU, and never uploaded. `synchronize` waits for the GPU."""

    synchronize: Callable[[], None]

    def own_part(self, uploaded: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - nothing is
        return self.buffer.tensor

    def drain(self) -> None:
        self.synchronize()


@dataclass(frozen=True)
class StatesInMemory(OptimizerStates):
    """`OptimizerStates` in memory of the host or the GPU."""

    specs: Sequence[StateBufferSpec]
    buffers: Mapping[str, InMemory]

    def leased(self, index: int, buffer: torch.Tensor | None, span: slice) -> dict[str, torch.Tensor]:  # noqa: ARG002
        return {spec.name: items_of(self.buffers[spec.name].tensor, spec.cut(span)) for spec in self.specs}


@dataclass(frozen=True)
class WholeStates(StatesInMemory):
    """States in host memory for a rule that sees whole parameters: a span is the whole unit."""

    def spans(self, wanted: Sequence[slice]) -> list[slice]:
        return [slice(wanted[0].start, wanted[-1].stop)] if wanted else []


@dataclass(frozen=True)
class ClientStates(WholeStates):
    """The masters' buffers of a unit in host memory, and its copy of a client's optimizer, which has the states."""

    client: UnitOptimizer


@dataclass(frozen=True)
class HeldInMemory(Held):
    """`Held` in host memory."""

    gradient: InMemory

    @property
    def tensor(self) -> torch.Tensor:
        return self.gradient.tensor

    @contextmanager
    def sum(self, *, first: bool) -> Iterator[torch.Tensor]:
        if first:
            self.gradient.tensor.zero_()
        yield self.gradient.tensor

    def load(self, span: slice) -> torch.Tensor:
        return items_of(self.gradient.tensor, span)


@dataclass(frozen=True)
class KeptOnGpu(GradientSink):
    """The sink of a unit that is updated on the GPU."""

    gradient: InMemory


class NotHeld(GradientSink):
    """The sink of a unit whose update begins when its gradient arrives."""

    gradient = None


# ----------------------------------------------------------------------------------------------------------------------
# State buffers of weights that every rank has whole on its GPU, where each rank updates all of them by itself.
#
# Readers and writers from outside see this rank's part in the unit's local layout, like in any other unit. After a
# write all parts are gathered, which makes the other ranks' copies the same again (`StateAccess.weights_changed`).


@dataclass(frozen=True, eq=False)
class PartOfWhole:
    """A `StateBuffer`. The padding of the part is zero and cannot be written."""

    tensor: torch.Tensor
    """All ranks' parts, in slot layout."""
    numel: int
    """Elements of this rank's part."""
    places: Sequence[tuple[slice, int]]
    """Spans of the part and where each begins in `tensor`, ascending."""
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
        """Return the first span of `items` without padding. `items` belong to one parameter."""
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
        """Yield for each span of elements its place in `items` and a view of it."""
        for part, place in self.places:
            first, last = max(part.start, items.start), min(part.stop, items.stop)
            if first < last:
                begin = place + first - part.start
                yield slice(first - items.start, last - items.start), self.tensor[begin : begin + last - first]


@dataclass(frozen=True)
class PartOfWeightsOnGpu(WeightsOnGpu):
    """`Weights` that every rank has whole."""

    buffer: PartOfWhole

    @contextmanager
    def to_fill(self) -> Iterator[torch.Tensor]:
        values = self.buffer.tensor.new_zeros(self.buffer.numel)
        yield values
        self.buffer.write(slice(0, self.buffer.numel), values)
