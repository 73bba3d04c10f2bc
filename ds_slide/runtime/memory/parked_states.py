"""Optimizer states on the GPU that wait in host memory while a forward or a backward needs their place.

A promoted unit keeps its place in host memory (`Unit.home`), whose contents are not read meanwhile. So its states can
be copied there at any moment between two updates, and other tensors can use the memory on the GPU. The weights stay on
the GPU: the forward under way computes with them. Buffers with a view stay too (the low halves of weights that a script
sees in fp32). `SlideRuntime` brings states back before any read or write of them: in `settle`, and at the beginning of
a step.

Copies run on the stream that computes, as updates on the GPU do, and the host waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.running import deferred_interrupt
from ds_slide.runtime.core.unit import Unit
from ds_slide.store.in_memory import InMemory


@dataclass(frozen=True)
class _Parked:
    """A state buffer whose storage on the GPU is empty."""

    on_gpu: torch.Tensor
    on_host: torch.Tensor
    nbytes: int


class ParkedStates:
    """Parks states and brings them back. The thread that computes calls all methods."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._parked: dict[int, list[_Parked]] = {}

    def may_park(self, unit: Unit) -> bool:
        """Whether the unit's states are on the GPU and have a place in host memory."""
        if unit.home is None or unit.order in self._parked:
            return False
        homes = unit.home.optimizer.buffers
        return bool(homes) and all(each.tensor is not None for each in homes.values())

    @torch.no_grad()
    def park(self, unit: Unit) -> int:
        """Move the states of `unit`, which may be parked. -> bytes that have come free."""
        assert unit.home is not None
        parked = []
        for name, buffer in unit.state.optimizer.buffers.items():
            on_gpu, on_host = buffer.tensor, unit.home.optimizer.buffers[name].tensor
            assert isinstance(buffer, InMemory) and on_gpu is not None and on_host is not None
            if not buffer.has_views:
                on_host.copy_(on_gpu)
                parked.append(_Parked(on_gpu, on_host, on_gpu.untyped_storage().nbytes()))
        with deferred_interrupt():  # states that are empty and not recorded as parked would be lost
            self._parked[unit.order] = parked
            for each in parked:
                each.on_gpu.untyped_storage().resize_(0)
        return sum(each.nbytes for each in parked)

    @torch.no_grad()
    def bring_back(self, unit: Unit) -> None:
        """Have the states of `unit` on the GPU again. Raises torch.OutOfMemoryError, and leaves them parked, where
        there is no place for them; harmless where they are not parked."""
        parked = self._parked.get(unit.order)
        if parked is None:
            return
        with deferred_interrupt():
            try:
                self._fill(parked)
            except torch.OutOfMemoryError:
                self._device.release_cached()
                self._fill(parked)
            del self._parked[unit.order]

    def bring_all_back(self, units: Sequence[Unit]) -> None:
        """Bring back all parked states."""
        for order in list(self._parked):
            self.bring_back(units[order])

    def _fill(self, parked: Sequence[_Parked]) -> None:
        try:
            for each in parked:
                each.on_gpu.untyped_storage().resize_(each.nbytes)
        except torch.OutOfMemoryError:
            for each in parked:
                each.on_gpu.untyped_storage().resize_(0)
            raise
        for each in parked:
            each.on_gpu.copy_(each.on_host)

    def forget(self) -> None:
        """Let go of the places in host memory: the engine has ended."""
        self._parked.clear()
