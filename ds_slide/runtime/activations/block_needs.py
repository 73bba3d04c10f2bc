"""How much GPU memory the backward of a block takes, its recomputation included, and whether there is as much."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

from ds_slide.plan.spare import Measured, Shape
from ds_slide.runtime.activations.peaks import Peaked, Peaks

SPAN = "backward of a block"


class BlockNeeds:
    """Learnt in the first steps, by kind of block, at the largest shape; called by the thread that computes."""

    def __init__(self, gpu: Peaked, peaks: Peaks, kinds: Mapping[int, Hashable]) -> None:
        """`kinds`: of the blocks, by `Unit.order`."""
        self._gpu, self._peaks, self._kinds = gpu, peaks, kinds
        self._found: dict[Hashable, Measured] = {}
        self._shape: Shape | None = None
        self._usable = 0.0
        self._begun: tuple[int, int] | None = None
        """The block that has its backward, and what was on the GPU when that began."""
        self._at_shape: dict[Hashable, float] = {}

    def begin_forward(self, shape: Shape | None, usable: float) -> None:
        """A batch of this shape begins, on a GPU of so many bytes."""
        self._shape, self._usable, self._begun = shape, usable, None
        self._at_shape = {} if shape is None else {kind: each.at(shape) for kind, each in self._found.items()}

    def begin(self, order: int) -> None:
        """The backward of a block begins, whose need is to be learnt. Harmless when called twice."""
        if self._shape is not None and (self._begun is None or self._begun[0] != order):
            self._peaks.begin(SPAN)
            self._begun = order, self._gpu.allocated()

    def end(self, order: int) -> None:
        """It has ended."""
        if self._shape is None or self._begun is None or self._begun[0] != order:
            return
        (_, base), self._begun = self._begun, None
        kind, needed = self._kinds[order], max(0, self._peaks.end(SPAN) - base)
        known = self._found.get(kind)
        # Of calls of one shape the last one counts: in the first one it is learnt what the block saves, which takes
        # memory of its own.
        if known is None or self._shape.tokens >= known.shape.tokens:
            self._found[kind] = Measured(self._shape, needed, 0)

    def room_beside(self, order: int) -> float:
        """Bytes that are free beside what the block needs; less than 0 where it lacks some."""
        needed = self._at_shape.get(self._kinds[order])
        return math.inf if needed is None else self._usable - self._gpu.allocated() - needed
