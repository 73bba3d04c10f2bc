"""Uploads of weights from host memory or SSD into a GPU buffer, by a lane; no collective is called here.

For shared weights the parts of all ranks are uploaded. A block's parts are copied to a scratch buffer, one copy each,
and one kernel lays them out: its many small parameters would cost a copy each. An outer module's few large parts are
copied straight to their places: a scratch buffer would be as large as the outer module.

A GPU buffer of a unit whose weights are gathered ends with room for this rank's part, after the unit in slot layout.
The lane fills that room, and the compute thread gathers from it when it binds the unit
(`ds_slide.runtime.weights.gathers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ds_slide.model.layout import pieces
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import Failures, synchronize
from ds_slide.runtime.core.ranks.collectives import lay_out
from ds_slide.runtime.core.unit import Unit


def own_part(unit: Unit, buffer: torch.Tensor) -> torch.Tensor:
    """Return this rank's part ([local_numel]) of a gathered unit's GPU buffer, which has the unit's data type."""
    return buffer[buffer.numel() - unit.layout.local_numel :]


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

    def fill(self, unit: Unit, buffer: torch.Tensor) -> int:
        """Upload this rank's part of the unit's weights, or all ranks' parts of shared weights, into `buffer`."""
        buffer = buffer.view(unit.dtype)
        if (parts := self._shared.get(unit.order)) is not None:
            return self._fill_from_all(unit, parts, buffer)
        numel = unit.layout.local_numel
        target = own_part(unit, buffer) if unit.is_gathered else buffer[:numel]
        with unit.state.weights.for_upload() as weight:
            target.copy_(weight, non_blocking=True)
            if unit.state.weights.buffer.tier == "ssd":  # the host buffer goes to other weights at the end
                self._copied(unit)
        return numel * buffer.element_size()

    def _fill_from_all(self, unit: Unit, parts: Sequence[torch.Tensor], buffer: torch.Tensor) -> int:
        numel = unit.layout.local_numel
        if unit.is_streamed:
            assert self._scratch is not None
            scratch = self._scratch.view(unit.dtype)
            for rank, part in enumerate(parts):
                scratch[rank * numel : (rank + 1) * numel].copy_(part, non_blocking=True)
            lay_out(unit.layout, scratch, buffer)
            return len(parts) * numel * buffer.element_size()
        moved = 0
        for rank, source, place in pieces(unit.layout):
            target = buffer[place]
            target.copy_(parts[rank][source], non_blocking=True)
            moved += target.numel() * target.element_size()
        return moved

    def _copied(self, unit: Unit) -> None:
        """Wait, on this lane, until its copies so far have run."""
        synchronize(self._failures, self._device.mark(host_waits=True), f"the upload of the weights of {unit.name}")
