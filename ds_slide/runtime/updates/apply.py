"""AdamW on the planes of one unit, where they live: host planes by the CPU kernel, device planes on the device.

Both give the same bits (see `ds_slide.optim.reference` for the arithmetic they share).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.hyper import AdamWHyper
from ds_slide.optim.reference import adamw_reference_
from ds_slide.runtime.unit import Unit
from ds_slide.store.planes import Planes

HostUpdate = Callable[[Unit, slice, Planes, torch.Tensor, Sequence[AdamWHyper], float], int]
"""(unit, span, planes of the span, gradient of the span, hyper-parameters by group, factor on the gradient) -> bytes
moved."""

# The reference works in fp64 temporaries, about 100 bytes an element: 4 Mi elements keep them at 400 MB.
REFERENCE_CHUNK = 1 << 22


def _segments(
    unit: Unit, within: slice, planes: Planes, gradient: torch.Tensor
) -> Iterator[tuple[Planes, torch.Tensor, int, int]]:
    """(planes, gradient, parameter group, first element in the unit's planes) of every group's part of `within`."""
    for segment in unit.layout.segments:
        start, stop = max(segment.start, within.start), min(segment.stop, within.stop)
        if start < stop:
            part = slice(start - within.start, stop - within.start)
            yield planes.part(part, unit.state.specs), gradient[part], segment.group, start


def host_update(updater: CpuUpdater) -> HostUpdate:
    """Update of units in host memory or on SSD; called by the update lane only."""

    def update(
        unit: Unit,
        within: slice,
        planes: Planes,
        gradient: torch.Tensor,
        hypers: Sequence[AdamWHyper],
        grad_scale: float,
    ) -> int:
        for part, span, group, first in _segments(unit, within, planes, gradient):
            updater.adamw_(
                part.weight,
                part.remainder,
                part.exp_avg,
                part.exp_avg_sq,
                span,
                hypers[group],
                grad_scale,
                exp_avg_scale=part.exp_avg_scale,
                exp_avg_sq_scale=part.exp_avg_sq_scale,
                seed=unit.order,
                first=first,
            )
        return 2 * planes.nbytes() + gradient.numel() * gradient.element_size()

    return update


def device_update(unit: Unit, gradient: torch.Tensor, hypers: Sequence[AdamWHyper], grad_scale: float) -> None:
    """Update of a GPU-tier unit on the compute stream."""
    whole = slice(0, unit.layout.trainable_numel)
    for planes, span, group, _ in _segments(unit, whole, unit.state.planes(whole), gradient):
        _update_on_device(planes, span, hypers[group], grad_scale)


def _update_on_device(planes: Planes, gradient: torch.Tensor, hyper: AdamWHyper, grad_scale: float) -> None:
    weight, remainder, exp_avg, exp_avg_sq = planes.weight, planes.remainder, planes.exp_avg, planes.exp_avg_sq
    if weight.is_cuda and weight.dtype == torch.bfloat16:
        from ds_slide.kernels.offload.adamw_planar import adamw_planar_

        assert remainder is not None
        adamw_planar_(weight, remainder, exp_avg, exp_avg_sq, gradient, hyper, grad_scale)
        return
    for start in range(0, weight.numel(), REFERENCE_CHUNK):
        part = slice(start, start + REFERENCE_CHUNK)
        low = None if remainder is None else remainder[part]
        adamw_reference_(weight[part], low, exp_avg[part], exp_avg_sq[part], gradient[part], hyper, grad_scale)
