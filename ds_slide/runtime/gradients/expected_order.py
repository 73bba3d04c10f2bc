"""A rank expects the gradients of a backward in the order of the backward before it, if both use the same blocks."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from ds_slide.runtime.core.unit import Unit


class ExpectedOrder:
    """The order that one rank expects. Called by the thread that computes."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.order: tuple[int, ...] = ()
        """`Unit.order` of the units of the last backward that ended, in the order of their gradients. Empty where a
        unit had several gradients, so that there is no order."""
        self._noted: list[int] = []

    def note(self, unit: Unit) -> None:
        """Note that the unit has a gradient now."""
        self._noted.append(unit.order)

    def adopt_noted(self) -> None:
        """Expect the next backward to be like this one, which has ended."""
        is_order = len(set(self._noted)) == len(self._noted)
        self.order = tuple(self._noted) if is_order else ()
        self._noted = []

    def forget_noted(self) -> None:
        """Forget the backward, which an exception has ended here; other ranks may still be in it."""
        self._noted = []

    def digest(self, backward: int) -> tuple[int, int]:
        """Return 64 bits of a digest of the order and of the number of the backward that begins, in two halves. (0, 0)
        where no order is expected, or where backward gathers weights: a gather must not come between averages whose
        order is fixed, because other ranks may be at another average."""
        gathers = any(unit.is_gathered and unit.is_streamed for unit in self._units)
        if gathers or not self.order or not self._fits_forward():
            return 0, 0
        what = b"".join(number.to_bytes(4, "little") for number in (backward & 0xFFFFFFFF, *self.order))
        found = blake2b(what, digest_size=8).digest()
        return int.from_bytes(found[:4], "little"), int.from_bytes(found[4:], "little")

    def _fits_forward(self) -> bool:
        """Whether the forwards of this backward have used the same blocks. A block that is expected in vain would keep
        the gradients behind it on the GPU until the end."""
        expected = set(self.order)
        return all(
            (unit.order in expected) == (unit.uses > 0 and not unit.trained.is_off and bool(unit.codec.numel))
            for unit in self._units
            if unit.spec.kind == "block"
        )
