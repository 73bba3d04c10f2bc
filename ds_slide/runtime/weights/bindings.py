"""Which weights the parameters of a unit point to: a slot of the window, a buffer that stays on the GPU, or nothing.

A block's parameters point into its slot from the moment it is entered until it is left. The owner of a slot is the unit
that is bound to it; `Window` gives the slot to another unit only after `release`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_slide.runtime.core.clients import Binding
from ds_slide.runtime.core.futures import wait_on_stream
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.parts import Parts
from ds_slide.runtime.weights.residents import Residents
from ds_slide.runtime.weights.window import Slot


class Bindings:
    """All methods are called by the thread that computes."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._window = parts.window
        self._clients = parts.context.clients
        self.residents = Residents(self._clients)
        self.slots: dict[int, Slot] = {}
        """Of the units that are bound to one, by `Unit.order`, the one that was bound first at the front."""
        self._visited: Unit | None = None
        """Bound for the graph of a backward, until another block is."""

    def bind(self, unit: Unit, views: Sequence[torch.Tensor]) -> None:
        """Let the unit's parameters point to `views`, one for each, in its own shape."""
        self._clients.set_availability(unit.parameters, Binding.COMPUTING)
        for parameter, view in zip(unit.parameters, views, strict=True):
            parameter.data = view

    def unbind(self, unit: Unit) -> None:
        """Let the unit's parameters point to nothing."""
        self.residents.leave(unit)
        for parameter in unit.parameters:
            parameter.data = self._parts.empty.tensors[unit.parameter_dtype]
        self._clients.set_availability(unit.parameters, Binding.ABSENT)

    def take_back(self, units: Sequence[Unit]) -> None:
        """Give the units the bits that they had before updates that no step has confirmed, and wait for that."""
        self._parts.updating.speculating.take_back(units, self._window)

    # ---- slots -------------------------------------------------------------------------------------------------------

    def bind_slot(self, unit: Unit, direction: str) -> Slot:
        """Bind a block to a slot, which the compute stream finds filled. `direction`: as `Window.acquire` has it."""
        assert self._window is not None
        self.take_back((unit,))
        if self._window.is_full_for(unit):
            self._give_up_slot()
        slot = self._window.acquire(unit, direction)  # type: ignore[arg-type]
        assert slot.ready is not None
        self.slots[unit.order] = slot
        recorder = self._parts.context.recorder
        if unit.is_gathered:
            with recorder.stalled(slot.ready.what):
                self._parts.context.device.wait(self._parts.gathers.into_slot(unit, slot))
        else:
            wait_on_stream(slot.ready, self._parts.context.device, recorder)
        self.bind(unit, slot.views(unit))
        return slot

    def unbind_slot(self, unit: Unit) -> None:
        """Give the unit's slot back, if it is bound to one."""
        slot = self.slots.pop(unit.order, None)
        if slot is not None:
            assert self._window is not None
            self.unbind(unit)
            self._window.release(slot)

    def _give_up_slot(self) -> None:
        """Unbind the first bound block that does not compute. Its backward binds its weights again when it needs
        them."""
        for slot in self.slots.values():
            if slot.unit is not None and slot.unit.can_give_up_slot:
                self.unbind_slot(slot.unit)
                return

    def bind_for_backward(self, unit: Unit) -> Slot:
        """Bind a block whose backward begins, if it is not bound yet."""
        self._end_visit(unit)
        slot = self.slots.get(unit.order)
        return self.bind_slot(unit, "backward") if slot is None else slot

    def visit(self, unit: Unit) -> Slot:
        """Bind a block for a node of a graph that a backward with `create_graph` has made. Such nodes go through the
        blocks from the first to the last, before the blocks' own backward begins."""
        self._end_visit(unit)
        self._visited = unit
        return self.bind_slot(unit, "backward")

    def _end_visit(self, successor: Unit) -> None:
        unit, self._visited = self._visited, None
        if unit is not None and unit is not successor and not unit.in_backward:
            self.unbind_slot(unit)

    def release_all(self, units: Sequence[Unit]) -> None:
        """Release all slots after an exception: nothing computes any more with what is bound."""
        for unit in units:
            unit.computing = unit.raw = 0
            self.unbind_slot(unit)
        if self._window is not None:
            self._window.release_all()
