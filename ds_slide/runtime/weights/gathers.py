"""Weights that no rank can read as a whole in its memory: each rank uploads its part, and the compute thread gathers.

They are the weights of several machines, of blocks on SSD, of units that are updated on the GPU, and of all units with
`"share_weights": false`. A gather is a collective, so it must not depend on the present content of a rank's window: a
block is gathered each time it is bound. If the window has a slot for each of its blocks, no block ever makes room for
another on any rank. Only then gathered weights stay until they change.
"""

from __future__ import annotations

import torch

from ds_slide.runtime.core.device import PASSED, Marker
from ds_slide.runtime.core.futures import Future
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.weights.uploads import own_part
from ds_slide.runtime.weights.window import Slot


class Gathers:
    """Gathers weights, called by the compute thread. `scratch` belongs to the collectives stream. It has the bytes of
    world_size times the largest rank's part; None where nothing is gathered."""

    def __init__(self, ranks: Ranks, scratch: torch.Tensor | None, *, all_fit: bool) -> None:
        """Make the gathers of an engine. `all_fit`: the window has a slot for each streamed block."""
        self._ranks = ranks
        self.scratch = scratch
        self._all_fit = all_fit
        self._gathered: dict[int, Future] = {}
        """The upload that was gathered last, by slot."""

    def forget(self, *, all_fit: bool) -> None:
        """Treat all slots as not gathered: the slots of another rank may have held something else."""
        self._all_fit = all_fit
        self._gathered.clear()

    def into_slot(self, unit: Unit, slot: Slot) -> Marker:
        """Gather the unit into the slot that holds it, after its upload. Returns the marker of its end."""
        assert slot.ready is not None
        uploaded = slot.ready.wait()
        if self._all_fit and self._gathered.get(slot.index) is slot.ready:
            return PASSED  # the compute stream has waited for it when it was bound before
        self._gathered[slot.index] = slot.ready
        # The upload has waited for compute that used the slot before it, but not for later compute.
        return self.into(unit, slot.buffer, uploaded, slot.free)

    def into(self, unit: Unit, buffer: torch.Tensor, *after: Marker, in_step: bool = False) -> Marker:
        """Gather the unit into a buffer in slot layout, from its weights on the GPU or from the uploaded parts."""
        assert self.scratch is not None
        buffer = buffer.view(unit.dtype)
        own = unit.state.weights.own_part(own_part(unit, buffer))
        gathered = self.scratch.view(unit.dtype)
        return self._ranks.gather_weights(unit.name, unit.layout, own, gathered, buffer, *after, in_step=in_step)
