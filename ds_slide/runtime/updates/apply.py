"""One step on the state buffers of one unit, where they are: the CPU kernel updates host state buffers, and the device
its own.

Both give the same bits (see `ds_slide.optim.rounding` for the arithmetic they share).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_slide.compression.codec import SegmentStep
from ds_slide.optim.cpu import NOTHING_BESIDE, Beside, CpuUpdater
from ds_slide.optim.reference import reference_update_
from ds_slide.optim.rule import Elements, Hyper, Part, UpdateRule
from ds_slide.runtime.core.lanes import Job
from ds_slide.runtime.core.unit import Unit
from ds_slide.store.state_buffers import StateBuffers, items_of
from ds_slide.store.way_back import UndoLog, WayBack


@dataclass(frozen=True)
class UpdateStep:
    """The update of a unit's segments in one step. `grad_scale`: the factor of its gradient."""

    segments: tuple[SegmentStep, ...]
    grad_scale: float


@dataclass(frozen=True)
class UpdateSpan:
    """The elements `items` of a unit, with their state buffers and their gradient."""

    unit: Unit
    items: slice
    buffers: StateBuffers
    gradient: torch.Tensor

    def segments(self, steps: Sequence[SegmentStep]) -> Iterator[tuple[StateBuffers, torch.Tensor, Hyper, int]]:
        """Yield (state buffers, gradient, hyper-parameters, first element in the unit's state buffers) for the part of
        the span in each of `steps`, in runs of the codec's length."""
        most, within = self.unit.codec.update_run, self.items
        for step in steps:
            segment = step.segment
            first, end = max(segment.start, within.start), min(segment.stop, within.stop)
            for start in range(first, end, most):
                stop = min(start + most, end)
                part = slice(start - within.start, stop - within.start)
                yield self.buffers.part(part, self.unit.state.specs), items_of(self.gradient, part), step.hyper, start


class Updates(Protocol):
    """What the update lane does with the states and the gradient of a span: `HostUpdates`, a client's optimizer
    (`ds_slide.runtime.updates.client`), or Muon (`ds_slide.runtime.updates.matrices`)."""

    @property
    def updater(self) -> CpuUpdater: ...

    def run(self, span: UpdateSpan, step: UpdateStep, part: Part = "whole", way_back: WayBack | None = None) -> int:
        """Update the elements of `span`. `way_back`: the unit's, where the span is one of its runs. -> bytes moved."""
        ...

    def then(self, step: UpdateStep, job: Job) -> None:
        """Run `job`, now or on another lane, when the update of `step` has ended that `run` has begun last."""
        ...

    def run_on_gpu(self, unit: Unit, gradient: torch.Tensor, step: UpdateStep) -> None:
        """Update a unit whose states are on the GPU, on the current stream. Called by the compute thread."""
        ...


@dataclass(frozen=True)
class HostUpdates:
    """Updates element by element: by the C++ kernels of units in host memory or on SSD, called by the update lane only,
    and of units on the GPU there."""

    updater: CpuUpdater

    def run(self, span: UpdateSpan, step: UpdateStep, part: Part = "whole", way_back: WayBack | None = None) -> int:
        unit = span.unit
        for buffers, gradient, hyper, first in span.segments(step.segments):
            run = None if way_back is None else way_back.part(slice(first, first + gradient.numel()))
            begin = unit.codec.update_begin(buffers.weight)
            beside = NOTHING_BESIDE if begin is buffers.weight else Beside(new_weight=buffers.weight)
            if run is not None:
                beside = _beside(run, hyper.rule)
            states, scales = buffers.states(hyper.rule), buffers.scales(hyper.rule)
            elements = Elements(begin, buffers.remainder, states, gradient, scales, unit.order, first)
            self.updater.update_(elements, hyper, step.grad_scale, part=part, beside=beside)
        log = way_back.part(span.items).nbytes if isinstance(way_back, UndoLog) else 0
        return _moved(span, part) + log

    def then(self, step: UpdateStep, job: Job) -> None:  # noqa: ARG002 - the update has ended with `run`
        job()

    def run_on_gpu(self, unit: Unit, gradient: torch.Tensor, step: UpdateStep) -> None:
        span = on_gpu(unit, gradient)
        for state_buffers, part, hyper, _ in span.segments(step.segments):
            _update_on_device(state_buffers, part, hyper, step.grad_scale)


def _beside(log: UndoLog | StateBuffers, rule: UpdateRule) -> Beside:
    """Return what an update writes to an undo log, or to state buffers (`log`) that get the new numbers."""
    if isinstance(log, StateBuffers):
        return Beside(log.weight, log.remainder, log.states(rule))
    if (old := log.old) is None:
        return Beside(new_weight=log.new_weight, low=log.low, slices=log.slices)
    scales = [scale for scale in old.scales(rule) if scale is not None]
    copied = [old.weight if log.new_weight is None else None, old.remainder, *old.states(rule), *scales]
    return Beside(new_weight=log.new_weight, old=copied)


def _moved(span: UpdateSpan, part: Part) -> int:
    weights, all_states = span.buffers.weight_bytes(), span.buffers.nbytes()
    moved = 2 * all_states
    if part == "weights":
        moved = weights + all_states
    elif part == "states":
        moved = 2 * (all_states - weights)
    elif part == "rest":
        return 0
    return moved + span.gradient.nbytes


def on_gpu(unit: Unit, gradient: torch.Tensor) -> UpdateSpan:
    """Return a whole unit whose states and gradient are on the GPU."""
    whole = slice(0, unit.codec.numel)
    return UpdateSpan(unit, whole, unit.state.state_buffers(whole), gradient)


def _update_on_device(state_buffers: StateBuffers, gradient: torch.Tensor, hyper: Hyper, grad_scale: float) -> None:
    weight, remainder = state_buffers.weight, state_buffers.remainder
    elements = Elements(weight, remainder, state_buffers.states(hyper.rule), gradient)
    if weight.is_cuda and weight.dtype == torch.bfloat16 and remainder is not None:
        hyper.rule.gpu_step(elements, hyper, grad_scale)
    else:
        reference_update_(elements, hyper, grad_scale)
