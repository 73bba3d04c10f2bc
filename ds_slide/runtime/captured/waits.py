"""Whether the device waits for the host while blocks run as they are written.

The device has begun a block before the host has launched all of it, in most blocks: then it waits. Whether it has work
left when the host begins the next block says less. It is in the last product of the block then, 0.15 ms with 4,096
tokens of 3 B: two and four ranks that waited for the host in a third of their time recorded nothing
(benchmarks/results/2026-11-28_nvidia-h200-x4_ranks_2.md).
"""

from __future__ import annotations

from ds_slide.plan.spare import Shape
from ds_slide.report.log import log
from ds_slide.runtime.captured.shapes import WINDOW, SeenShape, Shapes
from ds_slide.runtime.core.device import Device, Marker


class Waits:
    """Watches the blocks of forwards without recordings. The thread that computes calls all methods."""

    def __init__(self, device: Device, shapes: Shapes) -> None:
        self.device = device
        self._shapes = shapes
        self._begun: Marker | None = None
        """The begin of the last block, behind its wait for weights. None where it is not known."""
        self._shape: Shape | None = None
        """The shape of the newest forward."""
        self._has_advised = False

    def note_call(self, seen: SeenShape | None) -> None:
        """Note a block before the host may wait for its weights. `seen`: the shape of the forward; None where it has
        recordings."""
        begun, self._begun = self._begun, None
        if begun is not None and seen is not None:
            seen.note_issue(is_behind=not begun.done())

    def note_begin(self, seen: SeenShape | None) -> None:
        """Note that the block begins to compute, behind the device's wait for its weights."""
        if seen is not None:
            self._begun = self.device.mark()

    def note_forward(self, shape: Shape | None, *, records: bool) -> None:
        """Note that a forward of `shape` begins, and that the one before has ended. `records`: shapes that come often
        enough are recorded. Says once that lengths which hardly ever come twice keep blocks from replaying."""
        if self._shape is not None:
            self._shapes.note(self._shape)
        self._shape = shape
        if records and not self._has_advised and (count := self._shapes.strangers):
            self._has_advised = True
            log.info(
                f"the last {WINDOW} batches had {count} shapes, so no block replays a recording, and the GPU waits for "
                "the host; lengths that are padded to a multiple of 128 come again (pad_to_multiple_of=128 in "
                "transformers' data collators)"
            )
