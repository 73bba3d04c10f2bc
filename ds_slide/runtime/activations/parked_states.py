"""Optimizer states on the GPU that wait in host memory while a forward or a backward needs their place.

A promoted unit keeps its place in host memory (`Unit.home`), whose contents nobody reads meanwhile. So its states can
be copied there at any moment between two updates, and the memory on the GPU given to others. The weights stay where
they are: the forward under way computes with them. Whoever reads or writes states of a unit brings them back first:
`SlideRuntime.settle`, and its update.

Copies run on the stream that computes, as updates on the GPU do, and the host waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_slide.runtime.unit import Unit


@dataclass(frozen=True)
class _Parked:
    """A state buffer whose storage on the GPU is empty."""

    on_gpu: torch.Tensor
    on_host: torch.Tensor
    nbytes: int


class ParkedStates:
    """Called by the thread that computes."""

    def __init__(self) -> None:
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
            assert on_gpu is not None and on_host is not None
            on_host.copy_(on_gpu)
            storage = on_gpu.untyped_storage()
            parked.append(_Parked(on_gpu, on_host, storage.nbytes()))
            storage.resize_(0)
        self._parked[unit.order] = parked
        return sum(each.nbytes for each in parked)

    @torch.no_grad()
    def bring_back(self, unit: Unit) -> None:
        """Have the states of `unit` on the GPU again. Raises torch.OutOfMemoryError, and leaves them parked, where
        there is no place for them; harmless where they are not parked."""
        parked = self._parked.get(unit.order, ())
        try:
            for each in parked:
                each.on_gpu.untyped_storage().resize_(each.nbytes)
        except torch.OutOfMemoryError:
            for each in parked:
                each.on_gpu.untyped_storage().resize_(0)
            raise
        for each in parked:
            each.on_gpu.copy_(each.on_host)
        self._parked.pop(unit.order, None)
