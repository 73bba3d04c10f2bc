"""Tells the integration when resident parameters are used by the model and when a script may read them.

Streamed blocks are COMPUTING from bind to unbind and ABSENT otherwise. Units that stay on the GPU keep their weights
between forwards too; they are KEPT then, so that the integration can tell a script's writes from the model's reads. A
write to the GPU's copy alone would be undone by the next update.
"""

from __future__ import annotations

from ds_slide.runtime.core.clients import Binding, Clients
from ds_slide.runtime.core.unit import Unit


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
