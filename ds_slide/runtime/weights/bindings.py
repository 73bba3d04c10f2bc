"""Binds the parameters of a unit to weights: a slot of the window, a buffer that stays on the GPU, or nothing.

A block's parameters point into its slot from its entry until its exit. The unit that is bound to a slot owns it;
`Window` gives the slot to another unit only after `release`.

`Residents` tells the integration when resident parameters are used by the model and when a script may read them.
Streamed blocks are COMPUTING from bind to unbind and ABSENT otherwise. Units that stay on the GPU keep their weights
between forwards too; they are KEPT then, so that the integration can tell a script's writes from the model's reads. A
write to the GPU's copy alone would be undone by the next update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_slide.runtime.core.context import Binding, Clients
from ds_slide.runtime.core.futures import wait_on_stream
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.parts import Parts
from ds_slide.runtime.weights.window import Slot


class Bindings:
    """The bindings of all units. The compute thread calls all methods."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._window = parts.window
        self._clients = parts.context.clients
        self.residents = Residents(self._clients)
        self.slots: dict[int, Slot] = {}
        """The slots of bound units, by `Unit.order`; the unit that was bound first is at the front."""
        self._visited: Unit | None = None
        """The block bound for the graph of a backward, until another block is bound for it."""

    def bind(self, unit: Unit, views: Sequence[torch.Tensor]) -> None:
        """Point the unit's parameters and carried tensors to `views`, one each, in its own shape. Parameters without a
        view stay ABSENT: experts that are fetched when they are needed."""
        parameters = unit.in_slot[: len(views)]
        self._clients.set_availability(parameters, Binding.COMPUTING)
        for parameter, view in zip(parameters, views, strict=not unit.carried):
            parameter.data = view
        if unit.carried:
            unit.bind_carried(views[len(parameters) :])

    def unbind(self, unit: Unit) -> None:
        """Point the unit's parameters to empty tensors, and its carried tensors to host memory."""
        self.residents.leave(unit)
        empty = self._parts.empty.tensors
        for parameter, dtype in zip(unit.parameters, unit.dtypes, strict=True):
            parameter.data = empty[dtype]
        if unit.carried:
            unit.bring_carried_home()
        self._clients.set_availability(unit.parameters, Binding.ABSENT)

    # ---- slots -------------------------------------------------------------------------------------------------------

    def bind_slot(self, unit: Unit, direction: str) -> Slot:
        """Bind a block to a slot, and make the compute stream wait until it is filled. `direction`: see
        `Window.acquire`."""
        assert self._window is not None
        if unit.carried:
            unit.note_carried_writes()
        speculating = self._parts.updating.speculating
        if speculating.of(unit) is not None:
            speculating.take_back((unit,), self._window)
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
        views = slot.views(unit)
        self.bind(unit, views if slot.experts is None else views[: -len(unit.layout.experts)])
        return slot

    def bind_experts(self, unit: Unit, slot: Slot) -> None:
        """Point the parameters of experts to their places in a slot that was filled without them."""
        count = len(unit.layout.experts)
        self._clients.set_availability(unit.parameters[-count:], Binding.COMPUTING)
        for parameter, view in zip(unit.parameters[-count:], slot.views(unit)[-count:], strict=True):
            parameter.data = view

    def unbind_slot(self, unit: Unit) -> None:
        """Give the unit's slot back, if it is bound to one."""
        slot = self.slots.pop(unit.order, None)
        if slot is not None:
            assert self._window is not None
            self.unbind(unit)
            self._window.release(slot)

    def _give_up_slot(self) -> None:
        """Unbind the first bound block that does not compute. Its backward binds the weights again when it needs
        them."""
        for slot in self.slots.values():
            if slot.unit is not None and slot.unit.uses.can_give_up_slot:
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
        if unit is not None and unit is not successor and not unit.uses.in_backward:
            self.unbind_slot(unit)

    def release_all(self, units: Sequence[Unit]) -> None:
        """Release all slots after an exception: nothing computes with the bound weights any more."""
        for unit in units:
            unit.uses.computing = unit.uses.raw = 0
            self.unbind_slot(unit)
        if self._window is not None:
            self._window.release_all()


class Residents:
    """The units that are always on the GPU and whose parameters hold weights now, by `Unit.order`."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._computing: dict[int, Unit] = {}
        self._kept: dict[int, Unit] = {}

    def bound(self, unit: Unit, *, computing: bool) -> None:
        """Note that the unit's parameters hold its weights, and are COMPUTING so far."""
        to, other = (self._computing, self._kept) if computing else (self._kept, self._computing)
        other.pop(unit.order, None)
        to[unit.order] = unit
        if not computing:
            self._clients.set_availability(unit.parameters, Binding.KEPT)

    def is_kept(self, unit: Unit) -> bool:
        """Whether the unit's parameters have its weights between forwards."""
        return unit.order in self._kept

    def leave(self, unit: Unit) -> None:
        """Note that the unit's parameters are about to lose its weights. Harmless for other units."""
        self._computing.pop(unit.order, None)
        if self._kept.pop(unit.order, None) is not None:
            self._clients.set_availability(unit.parameters, Binding.COMPUTING)

    def begin_computing(self) -> None:
        """Mark all units as COMPUTING, because a forward or backward begins."""
        for unit in self._kept.values():
            self._clients.set_availability(unit.parameters, Binding.COMPUTING)
        self._computing.update(self._kept)
        self._kept.clear()

    def end_computing(self) -> None:
        """Mark all units as KEPT, because the forward or backward has ended."""
        for unit in self._computing.values():
            self._clients.set_availability(unit.parameters, Binding.KEPT)
        self._kept.update(self._computing)
        self._computing.clear()
