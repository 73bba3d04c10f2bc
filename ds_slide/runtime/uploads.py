"""Weights on their way from host memory or SSD into a GPU buffer, by a lane; no collective is called here.

A GPU buffer of a unit whose weights are gathered ends with room for this rank's part, behind the unit in slot layout:
the lane fills that, and the compute thread gathers from it when it binds the unit (`ds_slide.runtime.gathers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds_slide.runtime.device import Device
from ds_slide.runtime.ssd import SsdStates
from ds_slide.runtime.unit import Unit


def own_part(unit: Unit, buffer: torch.Tensor) -> torch.Tensor:
    """Where this rank's part of a gathered unit lies in a GPU buffer made for it ([local_numel])."""
    return buffer[buffer.numel() - unit.layout.local_numel :]


class Uploads:
    """Called by a lane, or by the compute thread while no lane brings the same unit."""

    def __init__(self, device: Device, ssd: SsdStates | None) -> None:
        self._device = device
        self._ssd = ssd

    def fill(self, unit: Unit, buffer: torch.Tensor) -> int:
        """A `ds_slide.runtime.window.Fill`: bring what is to come up of the unit into `buffer`."""
        numel = unit.layout.local_numel
        target = own_part(unit, buffer) if unit.is_gathered else buffer[:numel]
        with self._weight_of(unit) as weight:
            target.copy_(weight, non_blocking=True)
        return numel * buffer.element_size()

    @contextmanager
    def _weight_of(self, unit: Unit) -> Iterator[torch.Tensor]:
        if unit.state.weight is not None:
            yield unit.state.weight
            return
        assert self._ssd is not None
        with self._ssd.weight(unit) as weight:
            yield weight
            # The buffer goes back to the pool, so this lane waits until the copy has read it.
            self._device.mark(host_waits=True).synchronize()
