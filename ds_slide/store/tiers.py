"""The interface of a tier: what the runtime and the checkpoints do with states, wherever they are.

The states of a unit are three parts, and each is in one tier, whatever tier the others are in:

    Weights            in host memory, on the GPU, or on SSD
    OptimizerStates    in memory (of the host or the GPU), or on SSD
    GradientSink       held in host memory, held on SSD, kept on the GPU, or none: straight to its update

`ds_slide.store.in_memory` and `ds_slide.store.ssd.unit` implement them. A lease is asynchronous, because states on SSD
have to be read first: the part calls `use`, at once or from the thread that has completed the read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import torch

Tier = Literal["host", "gpu", "ssd"]
T = TypeVar("T")

Use = Callable[[torch.Tensor], None]
WeightView = Callable[[], torch.Tensor]
"""Makes a view of the leased weights of a unit. Called where the update runs."""
Views = Callable[[slice], dict[str, torch.Tensor]]
"""Makes views of the leased parameters in every optimizer state buffer, by name. Called where the update runs."""


class StateBuffer(Protocol):
    """One state buffer. Its readers and writers have waited for the unit (`SlideRuntime.settle`): nobody else touches
    it."""

    @property
    def tier(self) -> Tier: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def numel(self) -> int: ...

    @property
    def tensor(self) -> torch.Tensor | None:
        """All of it as it is now, None on SSD: an update that counts may give it other memory."""
        ...

    def view(self, items: slice) -> torch.Tensor | None:
        """Items for whoever keeps them: they remain those of the state buffer, whatever memory that gets. None on
        SSD."""
        ...

    def read(self, items: slice) -> torch.Tensor:
        """Items as they are stored: a view, or a copy of what is on SSD."""
        ...

    def write(self, items: slice, values: torch.Tensor) -> None: ...


class Lessee(Protocol):
    """An update. Only one of them has leases of a state at a time; the next one's wait."""

    is_pressed: bool
    """Somebody waits for it."""


class Weights(Protocol):
    """The weights' state buffer of a unit ([local_numel], in the unit's local layout)."""

    @property
    def buffer(self) -> StateBuffer: ...

    def reserve(self, count: int) -> None:
        """`count` leases follow that nothing but disk and updates can hold up."""
        ...

    def lease(self, update: Lessee, use: Callable[[WeightView], None], *, reserved: bool) -> None:
        """Call `use` once all of them are in memory. `put_back` follows. `reserved`: after `reserve`."""
        ...

    def put_back(self, span: slice) -> None:
        """The parameters `span` have been updated."""
        ...

    def press(self) -> None:
        """Somebody waits for an update that needs them."""
        ...

    def for_upload(self, copied: Callable[[], None]) -> AbstractContextManager[torch.Tensor]:
        """All of them in host memory, for a lane that copies them to the GPU. `copied` waits until it has: called at
        the end where their buffer is then given to others."""
        ...

    def to_fill(self) -> AbstractContextManager[torch.Tensor]:
        """Memory for all of them, which are stored at the end: once, when the unit is built."""
        ...

    def own_part(self, uploaded: torch.Tensor) -> torch.Tensor:
        """What the GPU has of them when they are gathered. `uploaded`: where it is after `for_upload`."""
        ...

    def hurry(self) -> AbstractContextManager[None]:
        """While somebody waits for their update without computing on."""
        ...

    def drain(self) -> None:
        """Wait until nothing of them is under way, or in a buffer that is not theirs."""
        ...


class OptimizerStates(Protocol):
    """The optimizer state buffers of a unit ([items of trainable_numel] each)."""

    @property
    def buffers(self) -> Mapping[str, StateBuffer]: ...

    def spans(self, wanted: Sequence[slice]) -> list[slice]:
        """The runs of parameters in which they are leased: `wanted`, or the chunks that they are stored in."""
        ...

    def lease(self, index: int, update: Lessee, use: Callable[[Views], None]) -> None:
        """Call `use` once span `index` is in memory. `put_back` follows."""
        ...

    def put_back(self, index: int) -> None: ...

    def hurry(self) -> AbstractContextManager[None]:
        """As `Weights.hurry`."""
        ...

    def drain(self) -> None:
        """As `Weights.drain`."""
        ...


class Held(Protocol):
    """A gradient that waits for the step in host memory or on SSD."""

    def take(self, copy: Use, stage: Callable[[Use], None]) -> None:
        """Hold a gradient that arrives: `copy` fills memory that the GPU can copy to, `stage` has a function called by
        the update lane with a buffer of whole pages in which the gradient is. Called by the d2h lane."""
        ...

    def sum(self, *, first: bool) -> AbstractContextManager[torch.Tensor]:
        """The sum so far (`first`: zero), which is held at the end as it then is. For the update lane, which may read
        it until its next call of a gradient."""
        ...

    def load(self, span: slice) -> torch.Tensor:
        """The elements `span`, for the update lane, until its next call of a gradient."""
        ...


@dataclass(frozen=True)
class Ways(Generic[T]):
    """What is done with a gradient, by where it goes."""

    on_gpu: Callable[[torch.Tensor], T]
    """It is kept in this buffer, of a unit that is updated on the GPU."""
    held: Callable[[Held], T]
    """It waits for the step."""
    at_once: Callable[[], T]
    """It goes straight to its update."""


class GradientSink(Protocol):
    """Where a gradient of the unit goes."""

    @property
    def buffers(self) -> Mapping[str, StateBuffer]:
        """The held gradient ([trainable_numel]), by its name."""
        ...

    def choose(self, ways: Ways[T]) -> T:
        """Call the one of them that it takes."""
        ...
