"""Deferred updates that begin under backward, before the norm is known, as if it was below the limit.

The update of a block in host memory runs as soon as its held gradient has arrived and the update lane has no other
work. It uses the factor of gradients that are not clipped. The new numbers go to spare state buffers where host memory
has room for them. Elsewhere they replace the old numbers, which the block's undo log can restore. At the step every
unit's update is queued as usual. Where the same update, with the same hyper-parameters and factor, has been done
already, it has next to nothing left to do: spare state buffers become the block's own, and the old ones are spare.
Otherwise the step takes the speculative update back first.
So no rank has to know the speculative updates of another one, and neither choice changes a bit.

Any other use that comes first (a forward, a reader of a state, a second backward, `zero_grad`, the end of the engine)
has the update taken back, and finds the old bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ds_slide.optim.rule import Hyper, Part
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import PASSED, Marker
from ds_slide.runtime.core.futures import Future
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.updates.apply import Updates, UpdateSpan, UpdateStep
from ds_slide.runtime.updates.passes import Passes
from ds_slide.store.way_back import SpareBuffers, UndoLog, WayBack

if TYPE_CHECKING:
    from ds_slide.runtime.weights.window import Window

CALM_STEPS = 4
"""Consecutive norms below the limit, after which the next norm is expected to be below it."""


class Speculation:
    """One speculative update of a unit. The compute thread makes it, and hands it to the update lane twice: with the
    gradient, to be done, and with the step's update or a task that takes it back, to be ended. The lane does the rest:
    only `run` and `end` write and exchange spare state buffers, before the future of the step's update is complete."""

    def __init__(
        self, host: Updates, unit: Unit, way_back: WayBack, step: UpdateStep, *, in_vain: bool = False
    ) -> None:
        """`in_vain`: it is taken back, whatever the step is."""
        self._host = host
        self.unit = unit
        self._way_back = way_back
        self._step = step
        self._in_vain = in_vain
        self._is_over = False
        self._done = 0
        """Number of runs of the way back that are done."""

    @property
    def numel_done(self) -> int:
        """Elements that have been updated."""
        return sum(run.stop - run.start for run in self._way_back.runs[: self._done])

    @property
    def replaces_weights(self) -> bool:
        """Whether the weights are new before the step. With several ranks they never are: the weights that a rank reads
        do not depend on its speculative updates."""
        return isinstance(self._way_back, UndoLog) and self._way_back.new_weight is None

    @property
    def has_more(self) -> bool:
        """Whether `run` has something left to do."""
        return not self._is_over and self._done < len(self._way_back.runs)

    def run(self) -> int:
        """Do a part of the update, unless it has been ended before its turn came. -> bytes moved."""
        if not self.has_more:
            return 0
        moved = self._do(self._part, self._way_back.runs[self._done])
        self._done += 1
        return moved

    def agrees(self, step: UpdateStep) -> bool:
        """Whether it is the update of `step`."""
        return not self._in_vain and self._step == step

    def end(self, step: UpdateStep) -> bool:
        """Finish the update if it has begun and is the update of `step`. -> whether it counts; otherwise the unit has
        its old bits."""
        if not (self._done and self.agrees(step)):
            self.take_back()
            return False
        done, left = self._way_back.runs[: self._done], self._way_back.runs[self._done :]
        self._is_over = True
        if isinstance(self._way_back, SpareBuffers):
            for run in left:
                self._do(self._part, run)
            self._way_back.exchange()
            return True
        for run in done:
            if self._way_back.slices is not None:
                self._do("rest", run)
            if self._way_back.new_weight is not None:
                self._host.updater.copy_(self._state("weight", run), self._way_back.new_weight[run])
        for run in left:
            self._do("whole", run, for_good=True)
        return True

    def take_back(self) -> None:
        """Give the unit its old bits. Harmless when called twice, as after an interrupt, and when it has counted."""
        if self._is_over:
            return
        self._is_over, done, self._done = True, self._way_back.runs[: self._done], 0
        if isinstance(self._way_back, SpareBuffers):
            return  # the unit's own buffers have not changed
        for run in done:
            if (old := self._way_back.part(run).old) is None:
                self._do("back", run)
                continue
            if self._way_back.new_weight is None:
                self._host.updater.copy_(self._state("weight", run), old.weight)
            for spec in self._way_back.specs:
                self._host.updater.copy_(self._state(spec.name, spec.cut(run)), old.optimizer[spec.name])

    @property
    def _part(self) -> Part:
        """The part of the step's update that is done ahead."""
        if isinstance(self._way_back, SpareBuffers):
            return "out_of_place"
        return "whole" if self._way_back.slices is None else "with_log"

    def _do(self, part: Part, run: slice, *, for_good: bool = False) -> int:
        span = UpdateSpan(self.unit, run, self.unit.state.state_buffers(run), self._state("gradient", run))
        return self._host.run(span, self._step, part, None if for_good else self._way_back)

    def _state(self, name: str, items: slice) -> torch.Tensor:
        return self.unit.state.raw(name, items)


class Speculating:
    """Decides which updates are done ahead, and keeps count. Called by the compute thread, but for `submit`."""

    def __init__(self, context: Context, host: Updates, passes: Passes) -> None:
        slide = context.settings.slide
        debug = slide.debug
        self._lane = context.lanes.update
        self._host = host
        self._passes = passes
        self._failures = context.failures
        self._wanted = slide.speculate
        self._in_vain = debug.take_back
        """The part of the updates, chosen at random, that never counts."""
        self._random = random.Random(debug.seed)
        self._calm_steps = 0
        self._ahead: dict[int, Speculation] = {}
        """Speculative updates by `Unit.order`, from `begin` until they count or are taken back."""
        self._statistics: dict[str, Any] = {"steps": 0, "taken_back": 0, "blocks": 0, "share": 0.0}

    def of(self, unit: Unit) -> Speculation | None:
        """Return the unit's update that no step has confirmed; None where it has none. Called by the compute thread."""
        return self._ahead.get(unit.order)

    def forget(self, unit: Unit) -> None:
        """Forget the unit's speculative update: the step's update of the unit ends it."""
        self._ahead.pop(unit.order, None)

    def begin(self, unit: Unit, hypers: Sequence[Hyper], grad_scale: float) -> None:
        """Make a speculative update of the unit, whose final gradient of this step is on its way. `hypers`: empty where
        the step is not known yet. A way back is for whole segments, so a unit with parameters that are off gets no
        speculative update."""
        if unit.way_back is None or not unit.is_uploaded or not hypers or not self._is_promising():
            return
        segments = unit.trained.coming(hypers)
        if not unit.trained.covers(segments):
            return
        in_vain = self._random.random() < self._in_vain
        self._ahead[unit.order] = Speculation(
            self._host, unit, unit.way_back, UpdateStep(tuple(segments), grad_scale), in_vain=in_vain
        )

    def _is_promising(self) -> bool:
        if self._wanted != "auto":
            return self._wanted
        return self._calm_steps >= CALM_STEPS and self._passes.exceed_forward

    def submit(self, speculation: Speculation, arrived: Marker) -> None:
        """Submit the update, run by run, so that urgent work of the lane comes in between. The gradient is in host
        memory when `arrived` has passed. Called by the lane that brings or sums the gradient."""

        def run() -> int:
            with self._passes.timed():
                moved = speculation.run()
            if speculation.has_more:
                self.submit(speculation, PASSED)
            return moved

        self._lane.submit(speculation.unit.order, arrived, run, "speculative update", "spare")

    def take_back(self, units: Iterable[Unit], window: Window | None) -> None:
        """Give the units their old bits, and wait until they have them. `window`: forgets each unit whose weights have
        changed meanwhile. An interrupt leaves the units with their speculative updates, to be taken back again."""
        ahead = [(unit, speculation) for unit in units if (speculation := self.of(unit)) is not None]
        futures = [self._taken_back(speculation) for _, speculation in ahead]
        for (unit, speculation), future in zip(ahead, futures, strict=True):
            future.wait()
            if window is not None and speculation.replaces_weights:
                window.forget(unit)
            self.forget(unit)

    def _taken_back(self, speculation: Speculation) -> Future:
        future = Future(self._failures, f"the old weights and states of {speculation.unit.name}")

        def run() -> int:
            speculation.take_back()
            future.complete()
            return 0

        self._lane.submit(speculation.unit.order, PASSED, run, "update taken back")
        return future

    # ---- the outcome of steps

    def begin_step(self, units: Sequence[Unit], hypers: Sequence[Hyper], grad_scale: float, expected: float) -> bool:
        """Count the speculative updates that the step finds. `expected`: the factor where nothing is clipped. ->
        whether any of them counts."""
        self._calm_steps = self._calm_steps + 1 if grad_scale == expected else 0
        begun = [each for unit in units if (each := self.of(unit)) is not None and each.numel_done]
        agreed = [each.agrees(UpdateStep(tuple(each.unit.trained.coming(hypers)), grad_scale)) for each in begun]
        done, trained = sum(each.numel_done for each in begun), sum(unit.codec.numel for unit in units)
        self._statistics["blocks"], self._statistics["share"] = len(begun), done / max(trained, 1)
        self._statistics["steps"] += bool(begun)
        self._statistics["taken_back"] += not all(agreed)
        return any(agreed)

    def skip_step(self) -> None:
        """Note that the step's gradients were not applied."""
        self._calm_steps = 0

    def statistics(self) -> dict[str, Any]:
        """Return, since the start, the number of steps that found speculative updates, and of steps that took some
        back; and for the last step, the number of blocks found updated, and their share of the parameters."""
        return dict(self._statistics)
