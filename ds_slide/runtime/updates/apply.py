"""One step on the state buffers of one unit, where they live: host state buffers by the CPU kernel, device state
buffers on the device.

Both give the same bits (see `ds_slide.optim.rounding` for the arithmetic they share).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ds_slide.compression.codec import SegmentStep
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.reference import reference_update_
from ds_slide.optim.rule import Hyper, Part, UpdateRule
from ds_slide.runtime.unit import Unit
from ds_slide.store.spare_buffers import WayBack
from ds_slide.store.state_buffers import StateBuffers, items_of
from ds_slide.store.undo_log import UndoLog

HostUpdate = Callable[
    [Unit, slice, StateBuffers, torch.Tensor, Sequence[SegmentStep], float, Part, WayBack | None], int
]
"""(unit, span, state buffers of the span, gradient of the span, steps of the update, factor on the gradient, part of
the step, the unit's way back where the span is one of its runs) -> bytes moved."""


def _segments(
    unit: Unit, within: slice, state_buffers: StateBuffers, gradient: torch.Tensor, steps: Sequence[SegmentStep]
) -> Iterator[tuple[StateBuffers, torch.Tensor, Hyper, int]]:
    """(state buffers, gradient, hyper-parameters, first element in the unit's state buffers) of what each of `steps`
    has of `within`, in runs of the codec's length."""
    most = unit.codec.update_run
    for step in steps:
        segment = step.segment
        first, end = max(segment.start, within.start), min(segment.stop, within.stop)
        for start in range(first, end, most):
            stop = min(start + most, end)
            part = slice(start - within.start, stop - within.start)
            yield state_buffers.part(part, unit.state.specs), items_of(gradient, part), step.hyper, start


def host_update(updater: CpuUpdater) -> HostUpdate:
    """Update of units in host memory or on SSD; called by the update lane only."""

    def update(
        unit: Unit,
        within: slice,
        state_buffers: StateBuffers,
        gradient: torch.Tensor,
        steps: Sequence[SegmentStep],
        grad_scale: float,
        part: Part,
        way_back: WayBack | None,
    ) -> int:
        for buffers, span, hyper, first in _segments(unit, within, state_buffers, gradient, steps):
            run = None if way_back is None else way_back.part(slice(first, first + span.numel()))
            begin = unit.codec.update_begin(buffers.weight)
            where = {} if begin is buffers.weight else {"new_weight": buffers.weight}
            updater.update_(
                begin,
                buffers.remainder,
                buffers.states(hyper.rule),
                span,
                hyper,
                grad_scale,
                scales=buffers.scales(hyper.rule),
                seed=unit.order,
                first=first,
                part=part,
                **(where if run is None else _arguments(run, hyper.rule)),
            )
        log = way_back.part(within).nbytes if isinstance(way_back, UndoLog) else 0
        return _moved(state_buffers, gradient, part) + log

    return update


def _arguments(log: UndoLog | StateBuffers, rule: UpdateRule) -> dict[str, Any]:
    """Of `CpuUpdater.update_`. `log`: or the state buffers that get the new numbers."""
    if isinstance(log, StateBuffers):
        return {"new_weight": log.weight, "new_remainder": log.remainder, "new_states": log.states(rule)}
    if (old := log.old) is None:
        return {"new_weight": log.new_weight, "low": log.low, "slices": log.slices}
    scales = [scale for scale in old.scales(rule) if scale is not None]
    copied = [old.weight if log.new_weight is None else None, old.remainder, *old.states(rule), *scales]
    return {"new_weight": log.new_weight, "old": copied}


def _moved(state_buffers: StateBuffers, gradient: torch.Tensor, part: Part) -> int:
    weights, all_states = state_buffers.weight_bytes(), state_buffers.nbytes()
    moved = 2 * all_states
    if part == "weights":
        moved = weights + all_states
    elif part == "states":
        moved = 2 * (all_states - weights)
    elif part == "rest":
        return 0
    return moved + gradient.nbytes


def device_update(unit: Unit, gradient: torch.Tensor, steps: Sequence[SegmentStep], grad_scale: float) -> None:
    """Update of a GPU-tier unit on the compute stream."""
    whole = slice(0, unit.codec.numel)
    for state_buffers, span, hyper, _ in _segments(unit, whole, unit.state.state_buffers(whole), gradient, steps):
        _update_on_device(state_buffers, span, hyper, grad_scale)


def _update_on_device(state_buffers: StateBuffers, gradient: torch.Tensor, hyper: Hyper, grad_scale: float) -> None:
    weight, remainder, states = state_buffers.weight, state_buffers.remainder, state_buffers.states(hyper.rule)
    if weight.is_cuda and weight.dtype == torch.bfloat16 and remainder is not None:
        hyper.rule.gpu_step(weight, remainder, states, gradient, hyper, grad_scale)
    else:
        reference_update_(weight, remainder, states, gradient, hyper, grad_scale)
