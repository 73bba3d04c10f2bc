"""Starts the update of a span of a unit, wherever its states live: in host memory or on SSD."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ds_slide.optim.rule import Hyper
from ds_slide.runtime.device import Marker
from ds_slide.runtime.transfers.ssd import SsdStates
from ds_slide.runtime.unit import Unit, Update
from ds_slide.runtime.updates.apply import HostUpdate
from ds_slide.runtime.updates.update_worker import UpdateWorker
from ds_slide.store.state_buffers import StateBuffers


class Updating:
    """Called by the compute thread (held gradients) or the d2h lane (gradients on arrival)."""

    def __init__(self, lane: UpdateWorker, apply: HostUpdate, ssd: SsdStates | None) -> None:
        self._lane = lane
        self._apply = apply
        self._ssd = ssd

    def reserve(self, unit: Unit) -> None:
        """The unit's update follows as soon as its gradient has arrived: keep what it needs."""
        if self._ssd is not None and unit.state.ssd is not None:
            self._ssd.reserve(unit)

    def start(
        self,
        unit: Unit,
        index: int,
        update: Update,
        ready: Marker,
        gradient: Callable[[], torch.Tensor],
        hypers: Sequence[Hyper],
        grad_scale: float,
        after: Callable[[], None] | None = None,
        *,
        reserved: bool = False,
    ) -> None:
        """Update span `index` from `gradient()` ([its elements], in host memory) once `ready` has passed, then call
        `after()`; all on the update lane."""
        span = unit.spans[index]

        def run(state_buffers: StateBuffers) -> int:
            moved = self._apply(unit, span, state_buffers, gradient(), hypers, grad_scale)
            update.finish(index)
            if after is not None:
                after()
            return moved

        if unit.state.ssd is None:
            self._lane.submit(unit.order, ready, lambda: run(unit.state.state_buffers(span)))
            return
        ssd = self._ssd
        assert ssd is not None

        def run_and_put_back(state_buffers: StateBuffers) -> int:
            moved = run(state_buffers)
            ssd.put_back(unit, index)
            return moved

        ssd.bring(
            unit,
            index,
            update,
            lambda state_buffers: self._lane.submit(unit.order, ready, lambda: run_and_put_back(state_buffers)),
            reserved=reserved,
        )
