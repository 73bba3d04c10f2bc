"""Spare state buffers: the way back from an update that writes its new numbers there, and leaves the old ones.

Where it counts, the unit takes them for its own, and the old ones are spare; where it is taken back, nothing has to be
done. It moves as many bytes as an update in place (csrc/update/out_of_place.hpp), where an undo log is written as well.
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
    """Of a unit in host memory. `own`, `spare`: the weights' state buffer and those of `specs`, by name. `runs`: of
    elements, without gaps, each updated at once.

    The update lane writes to them and exchanges them, the latter within an update of which the future is open: then
    both belong to it, and whoever else comes to the unit waits for it."""

    runs: Sequence[slice]
    specs: Sequence[StateBufferSpec]
    own: Mapping[str, InMemory]
    spare: Mapping[str, InMemory]

    def part(self, span: slice) -> StateBuffers:
        """The elements `span` of those that are spare now."""
        optimizer = {spec.name: self.spare[spec.name].tensor[spec.cut(span)] for spec in self.specs}
        return StateBuffers(self.spare["weight"].tensor[span], optimizer)

    def exchange(self) -> None:
        """The unit has what was spare, and the other way round: all of it has been written."""
        for name, own in self.own.items():
            own.exchange(self.spare[name])


WayBack = UndoLog | SpareBuffers
"""Of a unit: from an update that has begun before anybody knows whether it counts."""


def can_be_out_of_place(specs: Sequence[StateBufferSpec]) -> bool:
    """Whether there are such steps for these optimizer state buffers: for states in fp32."""
    return all(spec.dtype == torch.float32 for spec in specs if spec.state is not None)
