"""What the parts of a runtime are built with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ds_slide.plan.memory import Plan
from ds_slide.report.statistics import StepRecorder
from ds_slide.runtime.core.allocator import Allocator
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.ranks.shared_weights import SharedWeights
from ds_slide.runtime.core.settings import RuntimeSettings
from ds_slide.store.host_memory import HostMemory
from ds_slide.store.ssd.store import SsdStore


@dataclass(frozen=True)
class BuildContext:
    """`memory`: where `allocator` takes host memory from. `shared`: None where no rank reads another's weights."""

    plan: Plan
    settings: RuntimeSettings
    ranks: Ranks
    device: Device
    failures: Failures
    recorder: StepRecorder
    memory: HostMemory
    allocator: Allocator
    shared: SharedWeights | None
    cpu_threads: int
    """Threads of the update."""
    cpu_cores: Sequence[int]
    """The cores that these threads are pinned to; empty where they are not pinned."""
    stores: list[SsdStore] = field(default_factory=list)
    """Stores of the SSD tier: one, from when the first bytes go there."""
