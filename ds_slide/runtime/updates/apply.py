"""One step on the state buffers of one unit, where they live: host state buffers by the CPU kernel, device state
buffers on the device.

Both give the same bits (see `ds_slide.optim.fp32` for the arithmetic they share).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.reference import reference_update_
from ds_slide.optim.rule import Hyper, Part, UpdateRule
from ds_slide.runtime.unit import Unit
from ds_slide.store.state_buffers import StateBuffers
from ds_slide.store.undo_log import UndoLog

HostUpdate = Callable[[Unit, slice, StateBuffers, torch.Tensor, Sequence[Hyper], float, Part, UndoLog | None], int]
"""(unit, span, state buffers of the span, gradient of the span, hyper-parameters by group, factor on the gradient,
part of the step, where the old bytes of the span go) -> bytes moved."""


def _segments(
    unit: Unit, within: slice, state_buffers: StateBuffers, gradient: torch.Tensor
) -> Iterator[tuple[StateBuffers, torch.Tensor, int, int]]:
    """(state buffers, gradient, parameter group, first element in the unit's state buffers) of every group's part of
    `within`."""
    for segment in unit.codec.segments:
        start, stop = max(segment.start, within.start), min(segment.stop, within.stop)
        if start < stop:
            part = slice(start - within.start, stop - within.start)
            yield state_buffers.part(part, unit.state.specs), gradient[part], segment.group, start


def host_update(updater: CpuUpdater) -> HostUpdate:
    """Update of units in host memory or on SSD; called by the update lane only."""

    def update(
        unit: Unit,
        within: slice,
        state_buffers: StateBuffers,
        gradient: torch.Tensor,
        hypers: Sequence[Hyper],
        grad_scale: float,
        part: Part,
        log: UndoLog | None,
    ) -> int:
        for buffers, span, group, first in _segments(unit, within, state_buffers, gradient):
            hyper, place = hypers[group], slice(first - within.start, first - within.start + span.numel())
            old = () if log is None else _arrays(log.arrays.part(place, unit.state.specs), hyper.rule)
            updater.update_(
                buffers.weight,
                buffers.remainder,
                buffers.states(hyper.rule),
                span,
                hyper,
                grad_scale,
                scales=buffers.scales(hyper.rule),
                seed=unit.order,
                first=first,
                part=part,
                log=old,
                keeps_weight=log is not None and log.keeps_weight,
            )
        weights, states = state_buffers.weight_bytes(), state_buffers.nbytes() - state_buffers.weight_bytes()
        moved = {"whole": 2 * (weights + states), "weights": 2 * weights + states, "states": 2 * states}
        return moved[part] + gradient.nbytes + (0 if log is None else log.arrays.nbytes())

    return update


def _arrays(log: StateBuffers, rule: UpdateRule) -> list[torch.Tensor | None]:
    """In the order of `CpuUpdater.update_`."""
    return [log.weight, log.remainder, *log.states(rule), *filter(lambda scale: scale is not None, log.scales(rule))]


def device_update(unit: Unit, gradient: torch.Tensor, hypers: Sequence[Hyper], grad_scale: float) -> None:
    """Update of a GPU-tier unit on the compute stream."""
    whole = slice(0, unit.codec.numel)
    for state_buffers, span, group, _ in _segments(unit, whole, unit.state.state_buffers(whole), gradient):
        _update_on_device(state_buffers, span, hypers[group], grad_scale)


def _update_on_device(state_buffers: StateBuffers, gradient: torch.Tensor, hyper: Hyper, grad_scale: float) -> None:
    weight, remainder, states = state_buffers.weight, state_buffers.remainder, state_buffers.states(hyper.rule)
    if weight.is_cuda and weight.dtype == torch.bfloat16 and remainder is not None:
        hyper.rule.gpu_step(weight, remainder, states, gradient, hyper, grad_scale)
    else:
        reference_update_(weight, remainder, states, gradient, hyper, grad_scale)
