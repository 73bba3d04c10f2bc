"""Deferred updates that begin under backward, before the norm is known, as if it was below the limit.

The update of a block in host memory runs as soon as its held gradient has arrived and the update lane has nothing
better to do, with the factor that the gradients get where nothing is clipped. What it overwrites goes to the block's
undo log. At the step every unit's update is queued as ever; where it finds that the same update, of the same
hyper-parameters and factor, has been done already, it has nothing left to do, and otherwise it takes that back first.
So no rank has to know what another one has speculated, and neither choice changes a bit.

Whoever else comes first (a reader of a state, a second backward, `zero_grad`, the end of the engine) has the update
taken back, and finds the old bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.rule import Hyper
from ds_slide.runtime.device import PASSED, Marker
from ds_slide.runtime.transfers.handoff import Failures, Future
from ds_slide.runtime.unit import Unit
from ds_slide.runtime.updates.apply import HostUpdate
from ds_slide.runtime.updates.passes import Passes
from ds_slide.runtime.updates.update_worker import UpdateWorker
from ds_slide.store.undo_log import UndoLog

CALM_STEPS = 4
"""Norms below the limit, one after the other, before the next one is expected to be."""


class Speculation:
    """One update of a unit. The compute thread makes it, and hands it to the update lane: with the gradient, to be
    done, and with the update of the step or a task that takes it back, to be ended. The lane does all the rest."""

    def __init__(
        self, unit: Unit, log: UndoLog, hypers: Sequence[Hyper], grad_scale: float, *, in_vain: bool = False
    ) -> None:
        """`in_vain`: it is taken back, whatever the step brings."""
        self.unit = unit
        self._log = log
        self._hypers = tuple(hypers)
        self._grad_scale = grad_scale
        self._in_vain = in_vain
        self._is_over = False
        self.has_begun = False

    def run(self, update: HostUpdate) -> int:
        """Do the update, unless it has been ended before its turn came. -> bytes moved."""
        if self._is_over:
            return 0
        self.has_begun = True
        unit, whole = self.unit, slice(0, self.unit.codec.numel)
        gradient = unit.state.raw("gradient", whole)
        return update(
            unit, whole, unit.state.state_buffers(whole), gradient, self._hypers, self._grad_scale, "whole", self._log
        )

    def agrees(self, hypers: Sequence[Hyper], grad_scale: float) -> bool:
        """Whether it is the update with these."""
        return not self._in_vain and self._hypers == tuple(hypers) and self._grad_scale == grad_scale

    def end(self, updater: CpuUpdater, hypers: Sequence[Hyper], grad_scale: float) -> bool:
        """Let it count if it has been done, and is the update with `hypers` and `grad_scale`. -> whether it counts;
        otherwise the unit has its old bits."""
        if self.has_begun and not self._is_over and self.agrees(hypers, grad_scale):
            self._is_over = True
            if self._log.keeps_weight:
                updater.copy_(self._weight(), self._log.arrays.weight)
            return True
        self.take_back(updater)
        return False

    def take_back(self, updater: CpuUpdater) -> None:
        """Give the unit its old bits."""
        if self.has_begun and not self._is_over:
            old, state = self._log.arrays, self.unit.state
            if not self._log.keeps_weight:
                updater.copy_(self._weight(), old.weight)
            for name, tensor in old.optimizer.items():
                updater.copy_(state.raw(name, slice(0, tensor.numel())), tensor)
        self._is_over = True

    def _weight(self) -> torch.Tensor:
        return self.unit.state.raw("weight", slice(0, self.unit.codec.numel))


class Speculating:
    """Decides which updates are done ahead, and keeps count. Called by the compute thread, but for `submit`."""

    def __init__(
        self,
        lane: UpdateWorker,
        update: HostUpdate,
        updater: CpuUpdater,
        passes: Passes,
        failures: Failures,
        *,
        wanted: Literal["auto"] | bool,
        in_vain: float,
        seed: int,
    ) -> None:
        """`in_vain`: the part of them, chosen at random, that never counts."""
        self._lane = lane
        self._update = update
        self._updater = updater
        self._passes = passes
        self._failures = failures
        self._wanted = wanted
        self._in_vain = in_vain
        self._random = random.Random(seed)
        self._calm_steps = 0
        self._statistics: dict[str, Any] = {"steps": 0, "taken_back": 0, "blocks": 0, "share": 0.0}

    def begin(self, unit: Unit, hypers: Sequence[Hyper], grad_scale: float) -> None:
        """The unit's gradient of this step is on its way, and will be final."""
        if unit.undo_log is None or not unit.is_uploaded or not self._is_promising():
            return
        in_vain = self._random.random() < self._in_vain
        unit.speculation = Speculation(unit, unit.undo_log, hypers, grad_scale, in_vain=in_vain)

    def _is_promising(self) -> bool:
        if self._wanted != "auto":
            return self._wanted
        return self._calm_steps >= CALM_STEPS and self._passes.exceed_forward

    def submit(self, speculation: Speculation, arrived: Marker) -> None:
        """The gradient will be in host memory when `arrived` has passed. By the lane that brings or sums it."""

        def run() -> int:
            with self._passes.timed():
                return speculation.run(self._update)

        self._lane.submit(speculation.unit.order, arrived, run, "speculative update", "spare")

    def take_back(self, units: Iterable[Unit]) -> None:
        """Give the units their old bits, and wait until they have them."""
        futures = []
        for unit in units:
            if (speculation := unit.speculation) is None:
                continue
            unit.speculation = None
            futures.append(self._taken_back(speculation))
        for future in futures:
            future.wait()

    def _taken_back(self, speculation: Speculation) -> Future:
        future = Future(self._failures, f"the old weights and states of {speculation.unit.name}")

        def run() -> int:
            speculation.take_back(self._updater)
            future.keep()
            return 0

        self._lane.submit(speculation.unit.order, PASSED, run, "update taken back")
        return future

    def end(self, speculation: Speculation | None, hypers: Sequence[Hyper], grad_scale: float) -> bool:
        """By the update lane: whether the update of the step is this one, and has been done."""
        return speculation is not None and speculation.end(self._updater, hypers, grad_scale)

    # ---- the outcome of steps

    def begin_step(self, units: Sequence[Unit], hypers: Sequence[Hyper], grad_scale: float, expected: float) -> bool:
        """Count what the step finds done. `expected`: the factor where nothing is clipped. -> whether any of it
        counts."""
        self._calm_steps = self._calm_steps + 1 if grad_scale == expected else 0
        begun = [unit for unit in units if unit.speculation is not None and unit.speculation.has_begun]
        agreed = [unit.speculation is not None and unit.speculation.agrees(hypers, grad_scale) for unit in begun]
        trained = sum(unit.codec.numel for unit in units)
        self._statistics["blocks"] = len(begun)
        self._statistics["share"] = sum(unit.codec.numel for unit in begun) / max(trained, 1)
        self._statistics["steps"] += bool(begun)
        self._statistics["taken_back"] += not all(agreed)
        return any(agreed)

    def skip_step(self) -> None:
        """The gradients were not applied."""
        self._calm_steps = 0

    def statistics(self) -> dict[str, Any]:
        """Since the start the steps that found updates done ahead, and those of them that took some back; of the last
        step the blocks, and their share of the parameters, that it found done."""
        return dict(self._statistics)
