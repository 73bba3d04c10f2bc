"""The interface of a tier: what the runtime and the checkpoints do with states in any tier.

The states of a unit have three parts. Each part is in one tier, independent of the others.

    Weights            in host memory, on the GPU, or on SSD
    OptimizerStates    in memory (of the host or the GPU), or on SSD
    GradientSink       held in host memory, held on SSD, kept on the GPU, or passed straight to its update

`ds_slide.store.in_memory` and `ds_slide.store.ssd.unit` implement them. A lease is asynchronous, because states on SSD
have to be read first. The part tells the lease at once, or from the thread that has completed the read.

The classes are bases with the methods of states in memory. Most of these methods have nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch

Tier = Literal["host", "gpu", "ssd"]


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


class StateLease(Protocol):
    """The lease of one span of a unit (`ds_slide.store.state.SpanLease`): first its weights, then its optimizer states.
    Both methods get the host buffer that the part was read into, None for a part in memory."""

    index: int
    """The number of the span in the unit."""
    update: Lessee

    def have_weights(self, buffer: torch.Tensor | None) -> None: ...
    def have_states(self, buffer: torch.Tensor | None) -> None: ...


class Weights:
    """The weights' state buffer of a unit ([local_numel], in the unit's local layout)."""

    buffer: StateBuffer

    def reserve(self, count: int) -> None:
        """Announce `count` leases, which only the disk and updates can still delay."""

    def lease(self, lease: StateLease, *, reserved: bool) -> None:  # noqa: ARG002
        """Tell `lease` once all weights are in memory. `put_back` follows. `reserved`: whether `reserve` announced
        it."""
        lease.have_weights(None)

    def leased(self, buffer: torch.Tensor | None) -> torch.Tensor:
        """Return all weights of a lease that has `buffer`. Called where the update runs."""
        raise NotImplementedError

    def put_back(self, span: slice) -> None:
        """Accept the parameters `span` back after their update."""

    def press(self) -> None:
        """Make pending reads urgent: a thread waits for an update that needs these weights."""

    def for_upload(self) -> AbstractContextManager[torch.Tensor]:
        """Lend all weights in host memory to a lane that copies them to the GPU. Where the buffer is on SSD, the host
        memory is given to other users at the end, so the lane waits for its copy before."""
        return nullcontext(self.leased(None))

    def to_fill(self) -> AbstractContextManager[torch.Tensor]:
        """Yield memory for all weights, and store them at the end. Used once, when the unit is built."""
        return nullcontext(self.leased(None))

    def own_part(self, uploaded: torch.Tensor) -> torch.Tensor:
        """Return this rank's part on the GPU for the gather. `uploaded`: the part after `for_upload`."""
        return uploaded

    def hurry(self) -> AbstractContextManager[None]:
        """While this context is open, reads may evict buffers that are kept for later uses."""
        return nullcontext()

    def drain(self) -> None:
        """Wait for all transfers of the weights, and drop their copies in shared buffers."""


class OptimizerStates:
    """The optimizer state buffers of a unit ([items of trainable_numel] each), by name."""

    buffers: Mapping[str, StateBuffer]

    def spans(self, wanted: Sequence[slice]) -> list[slice]:
        """Return the spans of parameters that are leased at once: `wanted`, or the chunks on SSD."""
        return list(wanted)

    def lease(self, lease: StateLease) -> None:
        """Tell `lease` once its span is in memory. `put_back` follows."""
        lease.have_states(None)

    def leased(self, index: int, buffer: torch.Tensor | None, span: slice) -> dict[str, torch.Tensor]:
        """Return views of span `index`, the parameters `span`, in every state buffer, by name. The lease has `buffer`.
        Called where the update runs."""
        raise NotImplementedError

    def put_back(self, index: int) -> None:
        """Accept span `index` back after its update."""

    def hurry(self) -> AbstractContextManager[None]:
        """See `Weights.hurry`."""
        return nullcontext()

    def drain(self) -> None:
        """See `Weights.drain`."""


class GradientSink:
    """The place that a gradient of the unit goes to: kept on the GPU (`KeptOnGpu`), waiting for the step (`Held`), or
    straight to its update (`NotHeld`)."""

    gradient: StateBuffer | None
    """[trainable_numel]; None where it is not held."""

    @property
    def buffers(self) -> Mapping[str, StateBuffer]:
        """The held gradient, by its name."""
        return {} if self.gradient is None else {"gradient": self.gradient}


class Held(GradientSink):
    """A gradient that waits for the step in host memory or on SSD."""

    @property
    def tensor(self) -> torch.Tensor | None:
        """The memory of the gradient, which the GPU can copy to; None on SSD, where `store` takes a gradient."""
        return None

    def store(self, buffer: torch.Tensor) -> None:
        """Hold the gradient that has arrived in `buffer`, which has whole pages. Only the update lane calls this."""

    def sum(self, *, first: bool) -> AbstractContextManager[torch.Tensor]:
        """Yield the sum so far (zero if `first`), and hold it at the end. Only the update lane calls this. It may read
        the sum until its next call for any gradient."""
        raise NotImplementedError

    def load(self, span: slice) -> torch.Tensor:
        """Return the elements `span` to the update lane, valid until its next call for any gradient."""
        raise NotImplementedError
