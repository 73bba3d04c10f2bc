"""The interface of a tier: what the runtime and the checkpoints do with states in any tier.

The states of a unit have three parts. Each part is in one tier, independent of the others.

    Weights            in host memory, on the GPU, or on SSD
    OptimizerStates    in memory (of the host or the GPU), or on SSD
    GradientSink       held in host memory, held on SSD, kept on the GPU, or passed straight to its update

`ds_slide.store.in_memory` and `ds_slide.store.ssd.unit` implement them. A lease is asynchronous, because states on SSD
have to be read first. The part calls `use` at once or from the thread that has completed the read.
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
    """One state buffer. Its readers and writers have waited for the unit (`StateAccess.settle`) and have it to
    themselves."""

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
        """The whole buffer, None on SSD. A confirmed update may replace this tensor by another."""
        ...

    def view(self, items: slice) -> torch.Tensor | None:
        """Return a view that the caller may keep. It stays valid when the state buffer gets other memory. None on
        SSD."""
        ...

    def read(self, items: slice) -> torch.Tensor:
        """Return items as they are stored: a view in memory, a copy from SSD."""
        ...

    def write(self, items: slice, values: torch.Tensor) -> None: ...


class Lessee(Protocol):
    """An update. Only one update has leases of a state at a time. The leases of the next one wait."""

    is_pressed: bool
    """Whether a thread waits for this update."""


class Weights(Protocol):
    """The weights' state buffer of a unit ([local_numel], in the unit's local layout)."""

    @property
    def buffer(self) -> StateBuffer: ...

    def reserve(self, count: int) -> None:
        """Announce `count` leases, which only the disk and updates can still delay."""
        ...

    def lease(self, update: Lessee, use: Callable[[WeightView], None], *, reserved: bool) -> None:
        """Call `use` once all weights are in memory. `put_back` follows. `reserved`: whether `reserve` announced it."""
        ...

    def put_back(self, span: slice) -> None:
        """Accept the parameters `span` back after their update."""
        ...

    def press(self) -> None:
        """Make pending reads urgent: a thread waits for an update that needs these weights."""
        ...

    def for_upload(self, copied: Callable[[], None]) -> AbstractContextManager[torch.Tensor]:
        """Yield all weights in host memory, for a lane that copies them to the GPU. `copied` waits for that copy. It is
        called at the end where the buffer is then given to other users."""
        ...

    def to_fill(self) -> AbstractContextManager[torch.Tensor]:
        """Yield memory for all weights, and store them at the end. Used once, when the unit is built."""
        ...

    def own_part(self, uploaded: torch.Tensor) -> torch.Tensor:
        """Return this rank's part on the GPU for the gather. `uploaded`: the part after `for_upload`."""
        ...

    def hurry(self) -> AbstractContextManager[None]:
        """While this context is open, reads may evict buffers that are kept for later uses."""
        ...

    def drain(self) -> None:
        """Wait for all transfers of the weights, and drop their copies in shared buffers."""
        ...


class OptimizerStates(Protocol):
    """The optimizer state buffers of a unit ([items of trainable_numel] each)."""

    @property
    def buffers(self) -> Mapping[str, StateBuffer]: ...

    def spans(self, wanted: Sequence[slice]) -> list[slice]:
        """Return the spans of parameters that are leased at once: `wanted`, or the chunks on SSD."""
        ...

    def lease(self, index: int, update: Lessee, use: Callable[[Views], None]) -> None:
        """Call `use` once span `index` is in memory. `put_back` follows."""
        ...

    def put_back(self, index: int) -> None: ...

    def hurry(self) -> AbstractContextManager[None]:
        """See `Weights.hurry`."""
        ...

    def drain(self) -> None:
        """See `Weights.drain`."""
        ...


class Held(Protocol):
    """A gradient that waits for the step in host memory or on SSD."""

    def take(self, copy: Use, stage: Callable[[Use], None]) -> None:
        """Hold a gradient that arrives. `copy` fills memory that the GPU can copy to. `stage` makes the update lane
        call a function with the gradient in a buffer of whole pages. Called by the d2h lane."""
        ...

    def sum(self, *, first: bool) -> AbstractContextManager[torch.Tensor]:
        """Yield the sum so far (zero if `first`), and hold it at the end. Only the update lane calls this. It may read
        the sum until its next call for any gradient."""
        ...

    def load(self, span: slice) -> torch.Tensor:
        """Return the elements `span` to the update lane, valid until its next call for any gradient."""
        ...


@dataclass(frozen=True)
class Ways(Generic[T]):
    """One function for each place that a gradient can go to."""

    on_gpu: Callable[[torch.Tensor], T]
    """Called where the gradient stays in this buffer on the GPU, because the unit is updated there."""
    held: Callable[[Held], T]
    """Called where the gradient waits for the step."""
    at_once: Callable[[], T]
    """Called where the gradient goes straight to its update."""


class GradientSink(Protocol):
    """The place that a gradient of the unit goes to."""

    @property
    def buffers(self) -> Mapping[str, StateBuffer]:
        """The held gradient ([trainable_numel]), by its name."""
        ...

    def choose(self, ways: Ways[T]) -> T:
        """Call the function of `ways` that fits this sink."""
        ...
