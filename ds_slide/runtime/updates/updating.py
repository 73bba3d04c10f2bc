"""Starts the update of a unit, span by span, wherever its states live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_slide.optim.client import ClientRule
from ds_slide.optim.muon import MuonRule
from ds_slide.optim.rule import Hyper, Part
from ds_slide.plan.step_model import Schedules
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import Marker
from ds_slide.runtime.core.lanes import Turn
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.core.update import SquareSum, Update
from ds_slide.runtime.updates.apply import HostUpdates, Updates, UpdateSpan, UpdateStep
from ds_slide.runtime.updates.client import ClientUpdates
from ds_slide.runtime.updates.matrices import MatrixUpdates, takes_matrices
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


@dataclass(frozen=True)
class UnitUpdate:
    """The update of one unit from one gradient, span by span, on the update lane."""

    updating: Updating
    unit: Unit
    futures: Update
    gradient: GradientInMemory
    step: UpdateStep
    speculation: Speculation | None = None
    """The unit's, which has one span then; it counts or is taken back."""

    def start(self, index: int, ready: Marker, *, reserved: bool = False) -> None:
        """Update span `index` once `ready` has passed. `reserved`: `UnitState.reserve` was called before."""
        lane, order = self.updating.lane, self.unit.order

        # With two passes the lane gets both at once, and takes the states after all weights that are queued. Where the
        # GPU adds up gradients, nothing is written over the held one before the sum comes down in the last backward.
        turn: Turn = "later" if self.unit.gradient.gpu_sum is None else "last"

        def submit(lease: SpanLease) -> None:
            lane.submit(order, ready, lambda: self._run(lease))
            if self.futures.two_passes:
                lane.submit(order, ready, lambda: self._run_states(lease), "update of states", turn)

        self.unit.state.lease(index, self.unit.spans[index], self.futures, submit, reserved=reserved)

    def _run(self, lease: SpanLease) -> int:
        moved, two_passes = 0, self.futures.two_passes
        if self.speculation is None or not self.speculation.end(self.step):
            moved = self._apply(lease, "weights" if two_passes else "whole")
        self.updating.host.then(self.step, lambda: self._finish(lease))
        return moved

    def _finish(self, lease: SpanLease) -> None:
        self.futures.finish(lease.index)
        self.gradient.used()
        if not self.futures.two_passes:
            lease.put_back()

    def _run_states(self, lease: SpanLease) -> int:
        moved = self._apply(lease, "states")
        lease.put_back()
        self.futures.finish_states()
        return moved

    def _apply(self, lease: SpanLease, part: Part) -> int:
        with self.updating.passes.timed():
            span = UpdateSpan(self.unit, lease.span, lease.state_buffers(), self.gradient.load(lease.span))
            return self.updating.host.run(span, self.step, part)


def _updates(context: Context) -> Updates:
    """Return what updates units in host memory, by the run's rule."""
    match context.settings.rule:
        case ClientRule():
            return ClientUpdates(context)
        case MuonRule():
            return MatrixUpdates(context)
    return HostUpdates(context.updater)


class Updating:
    """Called by the compute thread (held gradients) or the d2h lane (gradients on arrival)."""

    def __init__(self, context: Context) -> None:
        settings = context.settings
        self.deferred = settings.held_dtype is not None
        """Gradients wait for the step. Otherwise updates begin as they arrive, until a backward is in doubt
        (`ds_slide.runtime.gradients.holding`)."""
        self.lane = context.lanes.update
        self._failures = context.failures
        self.host = _updates(context)
        self.passes = Passes(settings.slide.update_passes)
        self.speculating = Speculating(context, self.host, self.passes)

    def orthogonalize(self, units: Sequence[Unit], hypers: Sequence[Hyper], grad_scale: float) -> None:
        """Replace the held gradients of units that Muon updates, times `grad_scale`, by their orthogonal updates, and
        the square sums by those of the updates. Called by the compute thread, which has waited for all lanes."""
        assert isinstance(self.host, MatrixUpdates)
        for unit in units:
            steps = unit.trained.coming(hypers)
            if unit.gradient.has_sum and takes_matrices(steps):
                found = self.host.orthogonalize(unit, UpdateStep(steps, grad_scale))
                unit.gradient.square_sum = SquareSum("host", found)

    def prepare(self, units: Sequence[Unit], hypers: Sequence[Hyper]) -> None:
        """Record what updates of these units repeat in each step. Called by the compute thread, before `queue`."""
        if isinstance(self.host, MatrixUpdates):
            self.host.prepare(units, hypers)

    def products_s(self) -> float | None:
        """Return the seconds that a GPU takes for the products of a step that updates make beside the model (Muon),
        where they are known."""
        return self.host.products_s() if isinstance(self.host, MatrixUpdates) else None

    def update_on_gpu(self, unit: Unit, gradient: torch.Tensor, hypers: Sequence[Hyper], grad_scale: float) -> None:
        """Update a unit whose states are on the GPU. Called by the compute thread, on its stream."""
        self.host.run_on_gpu(unit, gradient, UpdateStep(unit.trained.begin(hypers), grad_scale))

    def close(self) -> None:
        """Free what updates on the GPU keep. No update runs any more."""
        if isinstance(self.host, MatrixUpdates):
            self.host.close()

    def schedules(self) -> Schedules:
        """Return when updates ran in the measured step and will run in the next. Speculative ones count as deferred."""
        passes = self.passes
        if not self.deferred:
            return Schedules("under backward", "under backward")
        return Schedules(
            measured="two passes" if passes.did_two else "deferred",
            coming="two passes" if passes.two else "deferred",
            two=passes.may_be_two,
            due=passes.due,
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
        ready, futures = unit.gradient.arrived.wait(), unit.open_update(self._failures, two_passes=two_passes)
        update = UnitUpdate(self, unit, futures, _HeldGradient(held), step, speculation)
        for index in range(len(unit.spans)):
            update.start(index, ready)
        # After an interrupt before this line a checkpoint is loaded, and then no update may be speculative.
        self.speculating.forget(unit)
