"""States in memory: of the host, or of the GPU, where they are updated.

Every state buffer is a flat tensor of its exact size. In host memory the weights' and a held gradient are page-locked,
because the GPU copies from and to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from ds_slide.store.state_buffers import StateBufferSpec, items_of
from ds_slide.store.tiers import Lessee, StateBuffer, T, Tier, Use, Views, Ways, WeightView


@dataclass(eq=False)
class InMemory:
    """A `StateBuffer`."""

    tensor: torch.Tensor
    tier: Tier = "host"
    _views: list[tuple[weakref.ref[torch.Tensor], slice]] = field(default_factory=list)
    """That have been given to whoever keeps them."""

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
        """Whether somebody keeps a view."""
        return any(reference() is not None for reference, _ in self._views)

    def exchange(self, other: InMemory) -> None:
        """Each has the other's memory, as have the views of it. Called by the owner of both."""
        self.tensor, other.tensor = other.tensor, self.tensor
        for buffer in (self, other):
            for reference, items in buffer._views:
                if (view := reference()) is not None:
                    # Not `view.data`, which a subclass may have made a way to write to the weights.
                    torch.Tensor.data.__set__(view, buffer.tensor[items])  # type: ignore[attr-defined]


@dataclass(frozen=True)
class WeightsInMemory:
    """`Weights` in host memory."""

    buffer: InMemory

    def reserve(self, count: int) -> None: ...

    def lease(
        self,
        update: Lessee,  # noqa: ARG002 - they are always there
        use: Callable[[WeightView], None],
        *,
        reserved: bool,  # noqa: ARG002
    ) -> None:
        use(lambda: self.buffer.tensor)

    def put_back(self, span: slice) -> None: ...

    def press(self) -> None: ...

    def for_upload(self, copied: Callable[[], None]) -> AbstractContextManager[torch.Tensor]:  # noqa: ARG002
        return nullcontext(self.buffer.tensor)

    def to_fill(self) -> AbstractContextManager[torch.Tensor]:
        return nullcontext(self.buffer.tensor)

    def own_part(self, uploaded: torch.Tensor) -> torch.Tensor:
        return uploaded

    def hurry(self) -> AbstractContextManager[None]:
        return nullcontext()

    def drain(self) -> None: ...


@dataclass(frozen=True)
class WeightsOnGpu(WeightsInMemory):
    """`Weights` that are updated on the GPU, and never uploaded. `synchronize` waits for the GPU."""

    synchronize: Callable[[], None]

    def own_part(self, uploaded: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - nothing is
        return self.buffer.tensor

    def drain(self) -> None:
        self.synchronize()


@dataclass(frozen=True)
class StatesInMemory:
    """`OptimizerStates` in memory of the host or the GPU."""

    specs: Sequence[StateBufferSpec]
    buffers: Mapping[str, InMemory]

    def spans(self, wanted: Sequence[slice]) -> list[slice]:
        return list(wanted)

    def lease(self, index: int, update: Lessee, use: Callable[[Views], None]) -> None:  # noqa: ARG002
        use(self._views)

    def put_back(self, index: int) -> None: ...

    def hurry(self) -> AbstractContextManager[None]:
        return nullcontext()

    def drain(self) -> None: ...

    def _views(self, span: slice) -> dict[str, torch.Tensor]:
        return {spec.name: items_of(self.buffers[spec.name].tensor, spec.cut(span)) for spec in self.specs}


@dataclass(frozen=True)
class HeldInMemory:
    """`Held` in host memory, and its sink."""

    gradient: InMemory

    @property
    def buffers(self) -> Mapping[str, StateBuffer]:
        return {"gradient": self.gradient}

    def choose(self, ways: Ways[T]) -> T:
        return ways.held(self)

    def take(self, copy: Use, stage: Callable[[Use], None]) -> None:  # noqa: ARG002
        copy(self.gradient.tensor)

    @contextmanager
    def sum(self, *, first: bool) -> Iterator[torch.Tensor]:
        if first:
            self.gradient.tensor.zero_()
        yield self.gradient.tensor

    def load(self, span: slice) -> torch.Tensor:
        return items_of(self.gradient.tensor, span)


@dataclass(frozen=True)
class KeptOnGpu:
    """The sink of a unit that is updated on the GPU."""

    gradient: InMemory

    @property
    def buffers(self) -> Mapping[str, StateBuffer]:
        return {"gradient": self.gradient}

    def choose(self, ways: Ways[T]) -> T:
        return ways.on_gpu(self.gradient.tensor)


@dataclass(frozen=True)
class NotHeld:
    """The sink of a unit whose update begins when its gradient arrives."""

    @property
    def buffers(self) -> Mapping[str, StateBuffer]:
        return {}

    def choose(self, ways: Ways[T]) -> T:
        return ways.at_once()
