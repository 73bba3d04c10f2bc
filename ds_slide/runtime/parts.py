"""The parts of a runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_slide.plan.memory import Plan, Taken
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.ranks.board import Board
from ds_slide.runtime.core.ranks.watchdog import Watchdog
from ds_slide.runtime.core.unit import Empty, Unit
from ds_slide.runtime.gradients.learning import Learning
from ds_slide.runtime.gradients.route import Gradients
from ds_slide.runtime.memory.spare_memory import SpareMemory
from ds_slide.runtime.ssd.ssd import SsdStates
from ds_slide.runtime.updates.updating import Updating
from ds_slide.runtime.weights.experts import ExpertRing
from ds_slide.runtime.weights.rows import RowBuffers
from ds_slide.runtime.weights.uploads import Gathers, Uploads
from ds_slide.runtime.weights.window import Window


@dataclass
class Parts:
    """The parts that `ds_slide.runtime.build` makes; `SlideRuntime` owns them."""

    context: Context
    plan: Plan
    """The present plan: states move, and more parameters may be trained."""
    units: list[Unit]
    window: Window | None
    empty: Empty
    gradients: Gradients
    learning: Learning
    uploads: Uploads
    gathers: Gathers
    updating: Updating
    spare: SpareMemory
    ssd: SsdStates | None = None
    rows: RowBuffers | None = None
    """The buffers of the outer module whose weight is streamed through the GPU."""
    experts: ExpertRing | None = None
    """The buffers of experts that move in parts."""
    watchdog: Watchdog | None = None
    announcements: Board | None = None
    """The board where ranks that may run different modules announce their gradients; None if all must run the same."""

    @property
    def deferred(self) -> bool:
        """Whether gradients wait for the step."""
        return self.updating.deferred

    @property
    def memory_report(self) -> dict[str, int]:
        """The bytes that are reported to users."""
        return self.plan.report()

    def pool_report(self) -> dict[str, dict[str, int | float | bool]]:
        """Return statistics of the pools that have buffers (`slide_stats()["pools"]`)."""
        return {what: pool.statistics() for what, pool in self.context.allocator.pools.items() if pool.addresses}

    @property
    def taken(self) -> Taken:
        """Bytes that this engine takes of the limits that all engines of a process share."""
        taken = self.plan.taken
        return replace(taken, host_states=taken.host_states + self.spare.activations.inputs.buffers.nbytes)

    @property
    def kept(self) -> int:
        """Bytes of activations kept on the GPU for later backwards."""
        return self.spare.activations.alive()
