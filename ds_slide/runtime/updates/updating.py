"""Starts the update of a span of a unit, wherever its states live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_slide.optim.rule import Hyper, Part
from ds_slide.plan.step_model import Schedules
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import Marker
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.core.update import Update
from ds_slide.runtime.updates.apply import HostUpdates, UpdateStep
from ds_slide.runtime.updates.passes import Passes
from ds_slide.runtime.updates.speculation import Speculating, Speculation
from ds_slide.store.state import SpanLease
from ds_slide.store.tiers import Held


class GradientInMemory(Protocol):
    """The gradient of a unit in host memory, for its update."""

    def load(self, span: slice) -> torch.Tensor:
        """Return the elements `span`."""

    def used(self) -> None:
        """Note that a span has been used."""


@dataclass(frozen=True)
class _HeldGradient:
    held: Held

    def load(self, span: slice) -> torch.Tensor:
        return self.held.load(span)

    def used(self) -> None:
        """Do nothing: the gradient stays where it is held."""


class Updating:
    """Called by the compute thread (held gradients) or the d2h lane (gradients on arrival)."""

    def __init__(self, context: Context) -> None:
        settings = context.settings
        self.deferred = settings.held_dtype is not None
        """Gradients wait for the step. Otherwise updates begin as they arrive, until a backward is in doubt
        (`ds_slide.runtime.gradients.holding`)."""
        self._lane = context.lanes.update
        self._failures = context.failures
        self._host = HostUpdates(context.updater)
        self.passes = Passes(settings.slide.update_passes)
        self.speculating = Speculating(context, self._host, self.passes)

    def schedules(self) -> Schedules:
        """Return when updates ran in the measured step and will run in the next. Speculative ones count as deferred."""
        passes = self.passes
        if not self.deferred:
            return Schedules("under backward", "under backward")
        return Schedules(
            measured="two passes" if passes.did_two else "deferred", coming="two passes" if passes.two else "deferred"
        )

    def queue(self, unit: Unit, hypers: Sequence[Hyper], grad_scale: float, held: Held) -> None:
        """Update the unit from its held gradient. Called by the compute thread. A speculative update with the same
        hyper-parameters and scale is confirmed and has no second pass."""
        speculation, step = self.speculating.of(unit), UpdateStep(tuple(unit.trained.begin(hypers)), grad_scale)
        two_passes = (
            self.passes.two
            and unit.state.in_memory
            and all(segment.hyper.two_passes for segment in step.segments)
            and not (speculation is not None and speculation.agrees(step))
        )
        ready, update = unit.gradient.arrived.wait(), unit.open_update(self._failures, two_passes=two_passes)
        for index in range(len(unit.spans)):
            self.start(unit, index, update, ready, _HeldGradient(held), step, speculation=speculation)
        # After an interrupt before this line a checkpoint is loaded, and then no update may be speculative.
        self.speculating.forget(unit)

    def start(
        self,
        unit: Unit,
        index: int,
        update: Update,
        ready: Marker,
        gradient: GradientInMemory,
        step: UpdateStep,
        *,
        reserved: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        """Update span `index` from `gradient` once `ready` has passed, on the update lane. `reserved`:
        `UnitState.reserve` was called before. `speculation`: the unit's, which has one span then; it counts or is taken
        back."""
        span = unit.spans[index]

        def apply(lease: SpanLease, part: Part) -> int:
            with self.passes.timed():
                return self._host.run(unit, span, lease.state_buffers(), gradient.load(span), step, part)

        def run(lease: SpanLease) -> int:
            moved = 0
            if speculation is None or not speculation.end(step):
                moved = apply(lease, "weights" if update.two_passes else "whole")
            update.finish(index)
            gradient.used()
            if not update.two_passes:
                lease.put_back()
            return moved

        def run_states(lease: SpanLease) -> int:
            moved = apply(lease, "states")
            lease.put_back()
            update.finish_states()
            return moved

        # With two passes the lane gets both at once, and takes the states after all weights that are queued.
        def submit(lease: SpanLease) -> None:
            self._lane.submit(unit.order, ready, lambda: run(lease))
            if update.two_passes:
                self._lane.submit(unit.order, ready, lambda: run_states(lease), "update of states", "later")

        unit.state.lease(index, span, update, submit, reserved=reserved)
