"""AdamW on the planes of one unit, where they live: host planes by the CPU kernel, device planes on the device.

Both give the same bits (see `ds_slide.optim.reference` for the arithmetic they share).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.hyper import AdamWHyper
from ds_slide.optim.reference import adamw_reference_
from ds_slide.runtime.ranks import Ranks
from ds_slide.runtime.unit import Unit
from ds_slide.store.state import UnitState

HostUpdate = Callable[[Unit, slice, torch.Tensor, Sequence[AdamWHyper], float], int]
"""(unit, span, gradient [>= trainable_numel], hyper-parameters by group, factor on the gradient) -> bytes moved."""
DeviceUpdate = Callable[[Unit, torch.Tensor, Sequence[AdamWHyper], float], None]

# The reference works in fp64 temporaries, about 100 bytes an element: 4 Mi elements keep them at 400 MB.
REFERENCE_CHUNK = 1 << 22

Planes = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def _segments(unit: Unit, within: slice, gradient: torch.Tensor) -> Iterator[tuple[Planes, torch.Tensor, int]]:
    state: UnitState = unit.state
    for segment in unit.layout.segments:
        span = slice(max(segment.start, within.start), min(segment.stop, within.stop))
        if span.start >= span.stop:
            continue
        remainder = None if state.remainder is None else state.remainder[span]
        yield (
            (state.weight[span], remainder, state.exp_avg[span], state.exp_avg_sq[span]),
            gradient[span],
            segment.group,
        )


def host_update(updater: CpuUpdater) -> HostUpdate:
    """Update of host-tier units; called by the update lane only."""

    def update(
        unit: Unit, within: slice, gradient: torch.Tensor, hypers: Sequence[AdamWHyper], grad_scale: float
    ) -> int:
        moved = 0
        for planes, span, group in _segments(unit, within, gradient):
            updater.adamw_(*planes, span, hypers[group], grad_scale)
            touched = sum(plane.numel() * plane.element_size() for plane in planes if plane is not None)
            moved += 2 * touched + span.numel() * span.element_size()
        return moved

    return update


def device_update(ranks: Ranks, scratch: torch.Tensor | None) -> DeviceUpdate:
    """Update of GPU-tier units on the compute stream. `scratch`: room to gather the updated weights in, for several
    ranks."""

    def update(unit: Unit, gradient: torch.Tensor, hypers: Sequence[AdamWHyper], grad_scale: float) -> None:
        whole = slice(0, unit.layout.trainable_numel)
        for planes, span, group in _segments(unit, whole, gradient):
            _update_on_device(planes, span, hypers[group], grad_scale)
        if ranks.world_size > 1:
            assert scratch is not None and unit.resident is not None
            ranks.gather_weights(unit, unit.state.weight, scratch, unit.resident, ranks.gradients)

    return update


def _update_on_device(planes: Planes, gradient: torch.Tensor, hyper: AdamWHyper, grad_scale: float) -> None:
    weight, remainder, exp_avg, exp_avg_sq = planes
    if weight.is_cuda and weight.dtype == torch.bfloat16:
        from ds_slide.kernels.adamw_planar import adamw_planar_

        assert remainder is not None
        adamw_planar_(weight, remainder, exp_avg, exp_avg_sq, gradient, hyper, grad_scale)
        return
    for start in range(0, weight.numel(), REFERENCE_CHUNK):
        part = slice(start, start + REFERENCE_CHUNK)
        low = None if remainder is None else remainder[part]
        adamw_reference_(weight[part], low, exp_avg[part], exp_avg_sq[part], gradient[part], hyper, grad_scale)
