"""Spare state buffers: a speculative update writes its new numbers there and leaves the old ones.

When the update is confirmed, the unit exchanges its buffers with the spare ones. When it is taken back, nothing has to
be done. It moves the same bytes as an update in place (csrc/update/out_of_place.hpp), which writes an undo log too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ds_slide.store.in_memory import InMemory
from ds_slide.store.state_buffers import StateBuffers, StateBufferSpec
from ds_slide.store.undo_log import UndoLog


@dataclass(frozen=True)
class SpareBuffers:
    """The spare buffers of a unit in host memory. `own`, `spare`: the state buffers of the weights and of `specs`, by
    name. `runs`: spans of elements without gaps, each updated at once.

    The update lane writes to the spare buffers and exchanges them. It exchanges them while the update's future is
    pending: until that is done both belong to the update, and other users of the unit wait for it."""

    runs: Sequence[slice]
    specs: Sequence[StateBufferSpec]
    own: Mapping[str, InMemory]
    spare: Mapping[str, InMemory]

    def part(self, span: slice) -> StateBuffers:
        """Return views of the elements `span` in the buffers that are spare now."""
        optimizer = {spec.name: self.spare[spec.name].tensor[spec.cut(span)] for spec in self.specs}
        return StateBuffers(self.spare["weight"].tensor[span], optimizer)

    def exchange(self) -> None:
        """Exchange the unit's buffers with the spare ones, which have been written completely."""
        for name, own in self.own.items():
            own.exchange(self.spare[name])


WayBack = UndoLog | SpareBuffers
"""How a unit takes back a speculative update."""


def can_be_out_of_place(specs: Sequence[StateBufferSpec]) -> bool:
    """Whether these optimizer state buffers can be updated out of place: their states must be in fp32."""
    return all(spec.dtype == torch.float32 for spec in specs if spec.state is not None)
