"""What the runtime is built from: settings that are decided once, and units before they have states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ds_slide.model.layout import UnitLayout
from ds_slide.model.precision import Precision
from ds_slide.model.structure import UnitSpec
from ds_slide.optim.low_precision import StateFormat
from ds_slide.optim.rule import UpdateRule
from ds_slide.plan.ssd_settings import SsdSettings
from ds_slide.report.trace import TraceRequest
from ds_slide.store.planes import PlaneSpec, optimizer_planes

ROW_BUFFERS = 2
"""Of an edge whose rows pass through the GPU: for its weight, and for its gradient."""


@dataclass(frozen=True)
class RuntimeSettings:
    """`gradient_dtype`: in which gradients are reduced and go to host memory where a unit's precision says no other.
    `held_dtype`: of held ones (None: not held), likewise. `rule`: by which weights
    are updated (None: no parameter has an optimizer; there are weights only, and nothing comes down from the GPU).
    `moments`: how its states are stored. `ssd`: None without an SSD tier.
    """

    gradient_dtype: torch.dtype
    held_dtype: torch.dtype | None
    rule: UpdateRule | None
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
    trace: TraceRequest | None = None
    """Steps that are recorded, without the rank in the file's name."""

    @property
    def trains(self) -> bool:
        return self.rule is not None

    def specs(self, dtype: torch.dtype) -> tuple[PlaneSpec, ...]:
        """The optimizer planes of weights of `dtype`."""
        return () if self.rule is None else optimizer_planes(dtype, self.rule, self.moments)

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
        """Elements of the GPU buffers of such an edge (`RowBuffers`)."""
        if not self.chunk_rows:
            return 0
        entry = self.layout.entries[0]
        return (2 if entry.trainable else 1) * ROW_BUFFERS * self.chunk_rows * entry.shape[1]
