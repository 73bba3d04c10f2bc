"""The objects that every part of a runtime may use; among them the other user of a model's parameters, the host
framework, whose own methods read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import torch
from torch import nn

from ds_slide.model.layout import Entry
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.plan.allocations import BLOCK_RING, OUTER_RING, PIECES_RING
from ds_slide.plan.memory import Plan
from ds_slide.report.statistics import StepRecorder
from ds_slide.runtime.core.allocator import Allocator
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

AS_THEY_ARE: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""A context for the engine's work on KEPT or ABSENT parameters. It costs 0.25 us; each access to `grad` of a parameter
that the integration watches would cost 2 us."""


class Binding(Enum):
    """What the parameters of a unit hold."""

    COMPUTING = auto()
    """The weights, for a forward or backward."""
    KEPT = auto()
    """The weights, between forwards."""
    ABSENT = auto()
    """Nothing."""


class Clients(Protocol):
    """`ds_slide.integration.partitions.DeepSpeedClients` for DeepSpeed."""

    def take_weights(self, parameter: nn.Parameter, entry: Entry) -> torch.Tensor:
        """Return this rank's elements of a parameter that is not the engine's yet, flat ([<= partition_numel]), on any
        device."""

    def take_carried(self, tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
        """Return this rank's elements of a carried tensor, in the same way."""

    def adopt(self, unit: Unit) -> None:
        """Free what the unit's parameters held: its state buffers hold the weights now."""

    def set_availability(self, parameters: Sequence[nn.Parameter], binding: Binding) -> None:
        """Record what the parameters hold. Called before they get weights and after they lose them."""


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
