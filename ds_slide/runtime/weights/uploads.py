"""Weights on their way into a GPU buffer: a lane uploads them, and the compute thread gathers the parts of the ranks.

For shared weights the parts of all ranks are uploaded. A block's parts are copied to a scratch buffer, one copy each,
and one kernel lays them out: its many small parameters would cost a copy each. An outer module's few large parts are
copied straight to their places: a scratch buffer would be as large as the outer module.

Weights that no rank can read as a whole in its memory are gathered: each rank uploads its part. They are the weights of
several machines, of blocks on SSD, of units that are updated on the GPU, and of all units with `"share_weights":
false`. A GPU buffer of such a unit ends with room for this rank's part, after the unit in slot layout. The lane fills
that room, and calls no collective; the compute thread gathers from it when it binds the unit.

A gather is a collective, so it must not depend on the present content of a rank's window: a block is gathered each time
it is bound. If the window has a slot for each of its blocks, no block ever makes room for another on any rank. Only
then gathered weights stay until they change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ds_slide.model.layout import Entry, UnitLayout, piece, pieces
from ds_slide.runtime.core.device import PASSED, Device, Marker
from ds_slide.runtime.core.futures import Failures, Future, synchronize
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.weights.window import Slot


def own_part(unit: Unit, buffer: torch.Tensor) -> torch.Tensor:
    """Return this rank's part ([local_numel]) of a gathered unit's GPU buffer, which has the unit's data type."""
    return buffer[buffer.numel() - unit.layout.local_numel :]


class LayOut:
    """Copies the parts of all ranks to their places in slot layout."""

    def __init__(self) -> None:
        self._known: dict[UnitLayout, Any] = {}
        """The pieces of layouts for the GPU's kernel."""

    def __call__(self, layout: UnitLayout, flat: torch.Tensor, buffer: torch.Tensor) -> None:
        """`flat`: [>= world_size * local_numel], rank-major. On the current stream."""
        if buffer.is_cuda:
            from ds_slide.kernels.offload.lay_out import Pieces, lay_out

            if (known := self._known.get(layout)) is None:
                known = self._known[layout] = Pieces(self.spans(layout))
            lay_out(known, flat, buffer)
            return
        spans = self.spans(layout)
        targets = [buffer[target : target + numel] for _, target, numel in spans]
        torch._foreach_copy_(targets, [flat[source : source + numel] for source, _, numel in spans])

    @staticmethod
    def spans(layout: UnitLayout) -> list[tuple[int, int, int]]:
        """Return the start in the ranks' parts, the start in the slot, and the elements of each piece."""
        local = layout.local_numel
        return [
            (rank * local + source.start, place.start, place.stop - place.start)
            for rank, source, place in pieces(layout)
        ]


class Copy(NamedTuple):
    """A copy of elements `span` of a parameter, flat, to GPU memory `target`."""

    entry: Entry
    span: slice
    target: torch.Tensor


class Uploads:
    """Uploads weights. Called by a lane, or by the compute thread while no lane uploads the same unit. `shared`: the
    parts of all ranks, by `Unit.order`. The scratch buffer belongs to the lane of the blocks."""

    def __init__(
        self,
        shared: Mapping[int, list[torch.Tensor]],
        scratch: torch.Tensor | None,
        device: Device,
        failures: Failures,
    ) -> None:
        """Prepare uploads. `scratch`: a buffer of bytes for the parts of the largest shared block; None where no block
        is shared."""
        self._device = device
        self._failures = failures
        self._shared = shared
        self._scratch = scratch
        self._lay_out = LayOut()

    def fill(self, unit: Unit, buffer: torch.Tensor, *, without_experts: bool = False) -> int:
        """Upload this rank's part of the unit's weights, or all ranks' parts of shared weights, into `buffer`."""
        buffer = buffer.view(unit.dtype)
        layout = unit.layout.without_experts() if without_experts else unit.slot_layout
        if (parts := self._shared.get(unit.order)) is not None:
            return self._fill_from_all(unit, layout, parts, buffer)
        numel = layout.local_numel
        target = own_part(unit, buffer) if unit.is_gathered else buffer[:numel]
        with unit.state.weights.for_upload() as weight:
            target.copy_(weight[:numel], non_blocking=True)
            if unit.state.weights.buffer.tier == "ssd":  # the host buffer goes to other weights at the end
                self._copied(unit)
        return numel * buffer.element_size()

    def _fill_from_all(
        self, unit: Unit, layout: UnitLayout, parts: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> int:
        numel = layout.local_numel
        if unit.is_streamed:
            assert self._scratch is not None
            scratch = self._scratch.view(unit.dtype)
            for rank, part in enumerate(parts):
                scratch[rank * numel : (rank + 1) * numel].copy_(part[:numel], non_blocking=True)
            self._lay_out(layout, scratch, buffer)
            return len(parts) * numel * buffer.element_size()
        moved = 0
        for rank, source, place in pieces(unit.layout):
            target = buffer[place]
            target.copy_(parts[rank][source], non_blocking=True)
            moved += target.numel() * target.element_size()
        return moved

    def fill_experts(self, unit: Unit, copies: Sequence[Copy]) -> int:
        """Upload slices of a unit's experts, from the parts of all ranks. Returns the bytes moved."""
        own = unit.state.weights.buffer
        parts = self._shared.get(unit.order)
        moved = 0
        for entry, span, target in copies:
            for rank in range(unit.layout.world_size):
                first, end = piece(entry, rank)
                start, stop = max(first, span.start), min(end, span.stop)
                if start >= stop:
                    continue
                place = slice(entry.offset + start - first, entry.offset + stop - first)
                source = own.read(place) if parts is None else parts[rank][place]
                target[start - span.start : stop - span.start].copy_(source, non_blocking=True)
            moved += target.numel() * target.element_size()
        return moved

    def _copied(self, unit: Unit) -> None:
        """Wait, on this lane, until its copies so far have run."""
        synchronize(self._failures, self._device.mark(host_waits=True), f"the upload of the weights of {unit.name}")


class Gathers:
    """Gathers weights, called by the compute thread. `scratch` belongs to the collectives stream. It has the bytes of
    world_size times the largest rank's part; None where nothing is gathered."""

    def __init__(self, ranks: Ranks, scratch: torch.Tensor | None, *, all_fit: bool) -> None:
        """Make the gathers of an engine. `all_fit`: the window has a slot for each streamed block."""
        self._ranks = ranks
        self.scratch = scratch
        self._all_fit = all_fit
        self._lay_out = LayOut()
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
        gathered = self.scratch.view(unit.dtype)[: self._ranks.world_size * unit.layout.local_numel]
        self._ranks.gather_weights(unit.name, own, gathered, *after, in_step=in_step)
        with self._ranks.on_stream():
            self._lay_out(unit.layout, gathered, buffer)
        return self._ranks.mark()
