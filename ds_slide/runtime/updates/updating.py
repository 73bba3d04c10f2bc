"""Starts the update of a span of a unit, wherever its states live."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ds_slide.compression.codec import SegmentStep
from ds_slide.optim.rule import Hyper, Part
from ds_slide.runtime.core.device import Marker
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.unit import Unit, Update
from ds_slide.runtime.core.update_lane import UpdateWorker
from ds_slide.runtime.updates.apply import HostUpdate
from ds_slide.runtime.updates.passes import Passes
from ds_slide.runtime.updates.speculation import Speculating, Speculation
from ds_slide.store.state import Leased
from ds_slide.store.tiers import Held


class Updating:
    """Called by the compute thread (held gradients) or the d2h lane (gradients on arrival)."""

    def __init__(
        self,
        lane: UpdateWorker,
        apply: HostUpdate,
        passes: Passes,
        speculating: Speculating,
        failures: Failures,
        *,
        deferred: bool,
    ) -> None:
        self.deferred = deferred
        """Gradients wait for the step. Otherwise updates begin as they arrive, until a backward is in doubt
        (`ds_slide.runtime.gradients.holding`)."""
        self._lane = lane
        self._apply = apply
        self.passes = passes
        self.speculating = speculating
        self._failures = failures

    def queue(self, unit: Unit, hypers: Sequence[Hyper], grad_scale: float, held: Held) -> None:
        """Update the unit, by the compute thread, from its held gradient. What has been done ahead is done if it is the
        same update, and so has no second pass."""
        speculation, steps = self.speculating.of(unit), unit.trained.begin(hypers)
        two_passes = (
            self.passes.two
            and unit.state.in_memory
            and all(step.hyper.two_passes for step in steps)
            and not (speculation is not None and speculation.agrees(steps, grad_scale))
        )
        ready, update = unit.arrived.wait(), unit.open_update(self._failures, two_passes=two_passes)
        for index, span in enumerate(unit.spans):
            gradient = functools.partial(held.load, span)
            self.start(unit, index, update, ready, gradient, steps, grad_scale, speculation=speculation)
        # After an interrupt before this a checkpoint is loaded, and nothing may be done ahead.
        self.speculating.forget(unit)

    def start(
        self,
        unit: Unit,
        index: int,
        update: Update,
        ready: Marker,
        gradient: Callable[[], torch.Tensor],
        steps: Sequence[SegmentStep],
        grad_scale: float,
        after: Callable[[], None] | None = None,
        *,
        reserved: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        """Update span `index` from `gradient()` ([its elements], in host memory) once `ready` has passed, then call
        `after()`; all on the update lane. `reserved`: after `UnitState.reserve`.
        `speculation`: of the unit, which has one span then; it counts or is taken back."""
        span = unit.spans[index]

        def apply(leased: Leased, part: Part) -> int:
            with self.passes.timed():
                return self._apply(unit, span, leased(), gradient(), steps, grad_scale, part, None)

        def run(leased: Leased) -> int:
            moved = 0
            if not self.speculating.end(speculation, steps, grad_scale):
                moved = apply(leased, "weights" if update.two_passes else "whole")
            update.finish(index)
            if after is not None:
                after()
            if not update.two_passes:
                unit.state.put_back(index, span)
            return moved

        def run_states(leased: Leased) -> int:
            moved = apply(leased, "states")
            unit.state.put_back(index, span)
            update.finish_states()
            return moved

        def submit(leased: Leased) -> None:
            self._lane.submit(unit.order, ready, lambda: run(leased))
            if update.two_passes:
                self._lane.submit(unit.order, ready, lambda: run_states(leased), "update of states", "later")

        unit.state.lease(index, span, update, submit, reserved=reserved)
