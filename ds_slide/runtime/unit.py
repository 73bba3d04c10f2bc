"""A unit at run time: one block or edge with its states, its place on the GPU and its pending update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ds_slide.model.layout import Entry, UnitLayout
from ds_slide.model.structure import UnitSpec
from ds_slide.runtime.handoff import Ticket
from ds_slide.store.state import UnitState

Availability = Callable[[Sequence[nn.Parameter], bool], None]


class Unit:
    """Ownership, in the order of a step:

    * the compute thread (forward: the caller's; backward: autograd's) owns the counters and the binding
      of the parameters to GPU memory;
    * `state.gradient` belongs to the d2h lane from `finalize` until `arrived` is kept, to the update lane
      until `updated` is kept, and to the compute thread otherwise;
    * the other planes of `state` belong to the update lane from the moment `updated` is replaced by an
      open ticket until that ticket is kept. Whoever else wants to read or write them waits for it first.
    """

    def __init__(
        self,
        spec: UnitSpec,
        layout: UnitLayout,
        parameters: Sequence[nn.Parameter],
        state: UnitState,
        order: int,
        updated: Ticket,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.parameters = list(parameters)
        self.state = state
        self.order = order
        """Place in the order of the next forward: the deadline of this unit's update. Edges come first."""
        self.updated = updated
        self.arrived = updated
        self.version = 0
        """Counts the weights' generations; a slot that holds an older one has to be filled again."""
        self.uses = 0
        self.uses_done = 0
        self.in_backward = False
        self.finalized = False
        """This backward's gradient has left the parameters."""
        self.gradient_ready = False
        """`state.gradient` holds the sum of this accumulation window's gradients so far."""
        self.resident: torch.Tensor | None = None
        """GPU buffer of a unit that is always on the GPU (edges, GPU-tier blocks), in slot layout."""
        self.square_sum_on: Literal["device", "host"] | None = None
        """Where the square sum of the current gradient is; None: nobody has computed it yet."""
        self.host_square_sum = 0.0
        self.trainable = [
            (parameter, entry)
            for parameter, entry in zip(self.parameters, layout.entries, strict=True)
            if entry.group is not None
        ]

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_streamed(self) -> bool:
        return self.resident is None

    @property
    def awaits_backward(self) -> bool:
        return self.uses > self.uses_done

    def slot_views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """One view per parameter, in its own shape, of a buffer in slot layout ([slot_numel])."""
        return [
            buffer[entry.slot_offset : entry.slot_offset + entry.numel].view(entry.shape)
            for entry in self.layout.entries
        ]


@dataclass(frozen=True)
class Empty:
    """What a parameter holds while its unit is not on the GPU: ZeRO-3's empty tensor."""

    tensor: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> Empty:
        return cls(torch.empty(0, dtype=dtype, device=device))


def partition_of(flat: torch.Tensor, entry: Entry, rank: int) -> torch.Tensor:
    """The elements of a parameter's flat tensor that `rank` holds: [<= partition_numel], without padding."""
    start = min(rank * entry.partition_numel, entry.numel)
    stop = min(start + entry.partition_numel, entry.numel)
    return flat[start:stop]
