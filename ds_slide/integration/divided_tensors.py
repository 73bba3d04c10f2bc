"""`state_dict()` and `load_state_dict()` of modules whose tensors beside packed weights are empty between forwards.

Packed weights in buffers, and what bitsandbytes keeps beside a packed parameter, have no memory of their own where they
are on SSD or where each rank has a part (`ds_slide.model.carried.Divided`). `state_dict` of a module gets whole copies;
it is no collective, because one rank may call it alone. `load_state_dict` is called on all ranks with the same values,
as all writes to weights are: each rank keeps its part of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ds_slide.checkpoint.state_buffers import write_frozen
from ds_slide.model.carried import Divided, find_carried
from ds_slide.model.layout import piece
from ds_slide.runtime.core.unit import CarriedTensor, Unit
from ds_slide.runtime.engine import SlideRuntime


class DividedTensors:
    """The hooks of one engine for such modules."""

    def __init__(self, runtime: SlideRuntime) -> None:
        self._runtime = runtime
        self._handles: list[Any] = []
        for unit in runtime.units:
            for module, tensors in _by_module(unit):
                self._attach(module, unit, tensors)

    def _attach(self, module: nn.Module, unit: Unit, tensors: Sequence[CarriedTensor]) -> None:
        def lend(*_args: Any) -> None:
            self._lend(unit, tensors, read=True)

        names = {each.entry.name.rpartition(".")[2] for each in tensors}

        def lend_empty(_module: nn.Module, state_dict: dict[str, Any], prefix: str, *_args: Any) -> None:
            # A `state_dict` where weights are gathered has them empty: then they stay as they are.
            for key in [key for key in state_dict if key.startswith(prefix) and key.rpartition(".")[2] in names]:
                if not state_dict[key].numel():
                    del state_dict[key]
            self._lend(unit, tensors, read=False)

        def take_back(*_args: Any) -> None:
            self._take_back(unit, tensors)

        def take_written(*_args: Any) -> None:
            self._take_written(unit, tensors)

        self._handles += [
            module.register_state_dict_pre_hook(lend),
            module.register_state_dict_post_hook(take_back),
            module.register_load_state_dict_pre_hook(lend_empty),
            module.register_load_state_dict_post_hook(take_written),
        ]

    def undo(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _lend(self, unit: Unit, tensors: Sequence[CarriedTensor], *, read: bool) -> None:
        """Give the tensors memory of their own. `read`: with their elements, where this rank can read all of them."""
        for each in tensors:
            if each.tensor.numel() or not (divided := Divided.of(each.tensor)):
                continue  # bound, gathered by a script, or whole in host memory
            whole = self._read(unit, each) if read else each.tensor.new_empty(divided.shape)
            if whole is not None:
                each.lend(whole)

    def _read(self, unit: Unit, carried: CarriedTensor) -> torch.Tensor | None:
        """Return the whole tensor in host memory, None where only all ranks together could read it."""
        entry, context = carried.entry, self._runtime.parts.context
        self._runtime.access.settle(unit)
        if unit.resident is not None:
            self._runtime.device.synchronize()
            return entry.viewed(unit.resident[entry.slot_place], entry.numel).view(entry.shape).cpu()
        if context.ranks.world_size == 1:
            return entry.viewed(unit.state.read("weight", entry.place), entry.numel).view(entry.shape)
        parts = None if context.shared is None else context.shared.parts.get(unit.order)
        if parts is None:
            return None
        if unit.shared is not None:
            unit.shared.await_others(unit, unit.version)
        whole = torch.cat([entry.viewed(part[entry.place], entry.partition_numel) for part in parts])
        return whole[: entry.numel].view(entry.shape)

    def _take_back(self, unit: Unit, tensors: Sequence[CarriedTensor]) -> None:
        for each in tensors:
            if each.is_lent:
                each.take_back()

    def _take_written(self, unit: Unit, tensors: Sequence[CarriedTensor]) -> None:
        """Make what has been loaded this rank's elements. Collective where weights are shared."""
        on_gpu = unit.resident is not None  # then they are whole, and a load has written the copy there
        written = [each for each in tensors if (each.is_lent or on_gpu) and each.tensor._version != each.version]
        if written:
            self._runtime.access.settle(unit)
            self._runtime.access.begin_writing()
        for each in written:
            start, stop = piece(each.entry, self._runtime.parts.context.ranks.rank)
            write_frozen(unit, each.entry, 0, each.tensor.detach().reshape(-1)[start:stop])
            each.version = each.tensor._version
        self._take_back(unit, tensors)
        if written:
            self._runtime.access.weights_changed(unit)


def _by_module(unit: Unit) -> list[tuple[nn.Module, list[CarriedTensor]]]:
    """Return the modules of a block with the tensors of theirs that may be empty between forwards."""
    if unit.spec.module is None or not any(Divided.of(each.tensor) for each in unit.carried):
        return []
    own = {id(each.tensor): each for each in unit.carried if Divided.of(each.tensor)}
    found = [
        (module, [own[id(each.tensor)] for each in several if id(each.tensor) in own])
        for module, several in find_carried(unit.spec.module).items()
    ]
    return [(module, several) for module, several in found if several]
