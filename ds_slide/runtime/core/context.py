"""The objects that every part of a runtime may use."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_slide.optim.cpu import CpuUpdater
from ds_slide.plan.allocations import BLOCK_RING, OUTER_RING, PIECES_RING
from ds_slide.plan.memory import Plan
from ds_slide.report.statistics import StepRecorder
from ds_slide.runtime.core.allocator import Allocator
from ds_slide.runtime.core.clients import Clients
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.lanes import Lanes
from ds_slide.runtime.core.pool import BufferPool
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.ranks.shared_weights import SharedWeights
from ds_slide.runtime.core.settings import RuntimeSettings
from ds_slide.runtime.core.unit import Unit
from ds_slide.store.host_memory import HostMemory
from ds_slide.store.ssd.store import SsdStore


@dataclass(frozen=True)
class Context:
    """The shared objects of an engine, made before the units and never replaced. `memory`: the source of the
    `allocator`'s host memory. `shared`: None where no rank reads another's weights."""

    plan: Plan
    """As the engine was built. The present plan is `ds_slide.runtime.parts.Parts.plan`: states move."""
    settings: RuntimeSettings
    clients: Clients
    ranks: Ranks
    device: Device
    failures: Failures
    recorder: StepRecorder
    memory: HostMemory
    allocator: Allocator
    shared: SharedWeights | None
    lanes: Lanes
    updater: CpuUpdater
    cpu_threads: int
    """Threads of the update."""
    stores: list[SsdStore] = field(default_factory=list)
    """The store of the SSD tier; empty until the first bytes go there."""

    @property
    def trains(self) -> bool:
        """Whether the engine trains. If not, it has weights only, for forwards without a step."""
        return self.settings.trains

    def ring(self, unit: Unit) -> BufferPool:
        """Return the pool of buffers for the gradient of a unit. It is looked up each time: a larger pool may replace
        it when more parameters are trained (`ds_slide.runtime.unfreezing`)."""
        pools = self.allocator.pools
        pool = pools[OUTER_RING if unit.spec.kind == "outer" else BLOCK_RING]
        return pool if pool.addresses else pools[PIECES_RING]
