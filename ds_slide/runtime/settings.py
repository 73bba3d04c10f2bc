"""What the runtime is built from: settings that are decided once, and units before they have states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ds_slide.model.layout import UnitLayout
from ds_slide.model.precision import Precision
from ds_slide.model.structure import UnitSpec
from ds_slide.optim.low_precision import StateFormat
from ds_slide.plan.needs import SsdNeeds, UnitSize
from ds_slide.store.planes import PlaneSpec, optimizer_planes


@dataclass(frozen=True)
class SsdSettings:
    """`parents`: (JSON path for messages, directory) of every disk. `needs`: what may go there. None is automatic."""

    parents: Sequence[tuple[str, Path]]
    needs: SsdNeeds
    backend: str
    queue_depth: int | None
    request_bytes: int | None


@dataclass(frozen=True)
class RuntimeSettings:
    """`gradient_dtype`: in which gradients are reduced and go to host memory where a unit's precision says no other.
    `held_dtype`: of held ones (None: not held), likewise. `moments`: storage format of the optimizer's moments. `ssd`:
    None without an SSD tier.
    """

    gradient_dtype: torch.dtype
    held_dtype: torch.dtype | None
    moments: StateFormat
    ssd: SsdSettings | None
    accumulates: bool
    """More than one micro-batch a step."""
    gradient_buffers: int
    cpu_threads: int
    cpu_cores: Sequence[int]
    huge_pages: bool
    delay_ms: float
    seed: int
    hang_timeout_s: float
    """After which a run that stands still is ended; 0: never."""
    trains: bool = True
    """False: no parameter has an optimizer; there are weights only, and nothing comes down from the GPU."""

    def specs(self, dtype: torch.dtype) -> tuple[PlaneSpec, ...]:
        """The optimizer planes of weights of `dtype`."""
        return optimizer_planes(dtype, self.moments) if self.trains else ()

    def gradient_of(self, precision: Precision) -> torch.dtype:
        """In which gradients of units of `precision` are reduced and go to host memory."""
        return precision.gradient or self.gradient_dtype

    def held_of(self, precision: Precision) -> torch.dtype | None:
        """In which they are held: sums of several in one data type, single ones as they come."""
        if self.held_dtype is None or self.accumulates or precision.gradient is None:
            return self.held_dtype
        return precision.gradient


@dataclass(frozen=True)
class UnitPlan:
    """A unit before it has states. `parameters` in the order of `layout.entries`."""

    spec: UnitSpec
    layout: UnitLayout
    parameters: Sequence[nn.Parameter]
    chunk_rows: int = 0
    """Rows of a chunk of an edge, one matrix, that passes through the GPU; 0: the unit is on the GPU as a whole."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.spec.precision.weight

    @property
    def passing_numel(self) -> int:
        """Elements of each GPU buffer through which such an edge passes (`ds_slide.runtime.rows`)."""
        return self.chunk_rows * self.layout.entries[0].shape[1] if self.chunk_rows else 0

    def size(self, settings: RuntimeSettings) -> UnitSize:
        """What the plan knows of it."""
        precision = self.spec.precision
        held = settings.held_of(precision)
        return UnitSize(
            self.spec.name,
            self.layout,
            self.spec.kind,
            settings.specs(self.dtype),
            self.dtype.itemsize,
            self.passing_numel,
            settings.gradient_of(precision).itemsize,
            0 if held is None else held.itemsize,
        )
