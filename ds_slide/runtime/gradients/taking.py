"""Takes the gradients of a backward out of the parameters, a unit as soon as all of its uses have ended.

    leave_backward     `finalize_block`: the block, and its parts
    end of backward    `finalize_rest`: outer modules, blocks with frozen inputs, units without a gradient
    one rank           each unit goes its way at once (`Gradients.send`)
    several ranks      each unit is announced, and goes its way when the ranks have agreed on it (`Agreement`)

With clipping off an update begins with the gradient, so a second gradient of the same unit is refused.
"""

from __future__ import annotations

import torch
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.runtime.core.ranks.conductor import Conductor
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.gradients.agreement import Agreement, Contribution
from ds_slide.runtime.gradients.holding import Doubts, defer_updates
from ds_slide.runtime.gradients.streamed_gradient import StreamedGradient
from ds_slide.runtime.gradients.totals import Totals
from ds_slide.runtime.parts import Parts
from ds_slide.runtime.step.accumulation import Accumulation
from ds_slide.runtime.step.phases import DEFER_HINT
from ds_slide.runtime.weights.bindings import Bindings
from ds_slide.runtime.weights.resident_weights import ResidentWeights


class Taking:
    """Takes gradients, unit by unit. All methods are called by the thread that computes."""

    def __init__(
        self,
        module: nn.Module,
        parts: Parts,
        accumulation: Accumulation,
        bindings: Bindings,
        resident_weights: ResidentWeights,
    ) -> None:
        self._parts = parts
        self.units = parts.units
        self._gradients = parts.gradients
        self._accumulation = accumulation
        self._learning = parts.learning
        self._bindings = bindings
        self._resident_weights = resident_weights
        self.doubts = Doubts(module)
        self.final = True
        """Whether the backward under way is the last one before the step."""
        self._agreement = self._agreement_of(parts)
        compressed = [unit.state.writes_change for unit in parts.units]
        self._totals = Totals(parts.context.ranks, parts.context.device, compressed)

    def _agreement_of(self, parts: Parts) -> Agreement | None:
        """Return the agreement of ranks on the units that have gradients; None where all run the same modules."""
        conductor = parts.context.ranks.conductor
        if parts.announcements is None or not isinstance(conductor, Conductor):
            return None
        return Agreement(conductor, parts.announcements, parts.context, self)

    @property
    def deferred(self) -> bool:
        """Whether gradients wait for the step."""
        return self._parts.updating.deferred

    def require_held(self, what: str) -> None:
        """Raise when gradients are not kept for `what`."""
        if not self.deferred:
            raise SlideError(f"{what} needs the gradients between backward() and step(); {DEFER_HINT}")

    def has_gradients(self) -> bool:
        """Whether the backward under way has given any parameter a gradient."""
        return self._accumulation.backward.has_gradients or any(unit.has_gradient for unit in self.units)

    # ---- a unit ------------------------------------------------------------------------------------------------------

    def finalize_block(self, unit: Unit) -> None:
        """Take the gradients of a block, whose last use in this backward has ended."""
        for finished in (*unit.parts, unit):
            # A backward for the gradient of inputs alone must begin no update, and wait for no other rank.
            if finished.has_gradient or not finished.trainable or self.has_gradients():
                self.finalize(finished)
        self.look()

    def finalize(self, unit: Unit, source: StreamedGradient | None = None, *, at_end: bool = False) -> None:
        """Take the gradients of `unit`. `source`: given where its backward is still making them. `at_end`: backward has
        ended, and nothing more comes."""
        if unit.gradient.finalized and not self.deferred:
            raise SlideError(
                f"{unit.name} received gradients again after its update had begun (used more than once under "
                f"re-entrant checkpointing, or a streamed head more than once in one backward); {DEFER_HINT}"
            )
        backward = self._accumulation.backward
        if not backward.has_gradients and (source is not None or self.has_gradients()):
            self._hold_in_doubt()
            backward.has_gradients = True
        if self._agreement is None:
            self._take(unit, source, final=self.final)
        elif unit.has_gradient and unit.codec.numel:
            unit.gradient.finalized = backward.has_taken = True
            self._agreement.announce(unit, at_end=at_end)

    def _hold_in_doubt(self) -> None:
        """Let gradients wait for the step from now on where the first update of the backward may not be meant."""
        why = None if self.deferred else self.doubts.why(at_boundary=self.final)
        if why is not None:
            defer_updates(self._parts, why)

    def _take(self, unit: Unit, source: StreamedGradient | None = None, *, final: bool) -> None:
        speculating = self._parts.updating.speculating
        if speculating.of(unit) is not None:  # one more gradient of the same step is added to the earlier ones
            speculating.take_back((unit,), self._parts.window)
        if unit.state.writes_change:
            # Perhaps no forward has used the unit: the next update overwrites the change, which would be lost.
            self._resident_weights.bind_if_fetched(unit)
        if final:
            self._learning.look(unit, self._accumulation.steps)
        # `send` makes a new `arrived` when it takes the gradient, and a new `updated` when it begins the update. If it
        # fails before, as where packing finds no memory, the futures are the same: nothing was taken.
        backward, arrived, updated = self._accumulation.backward, unit.gradient.arrived, unit.updated
        # A unit without gradients is taken for zero, which makes no mixture as long as it is only held.
        counts = source is not None or unit.has_gradient
        try:
            self._gradients.send(unit, final=final, source=source)
        finally:
            if self.deferred:
                backward.has_taken |= counts and unit.gradient.arrived is not arrived
            else:
                backward.has_taken |= unit.updated is not updated
        if self._parts.window is not None and unit.is_streamed and not self.deferred:
            self._parts.window.prefetch(unit, "backward")

    def take_left_gradient(self, unit: Unit) -> None:
        """Take the gradients that a graph without an output of the model's forward has left in the unit's parameters.
        SlideError where its update has begun without them."""
        backward = self._accumulation.backward
        try:
            self.require_held(f"a backward() that reaches {unit.name} and no output of the engine's forward")
            before = backward.has_taken, backward.has_gradients
            self.finalize(unit)
            backward.has_taken, backward.has_gradients = before
            unit.gradient.finalized = False
        finally:
            for parameter, _ in unit.trainable:
                parameter.grad = None

    # ---- the end of backward -----------------------------------------------------------------------------------------

    def finalize_rest(self, *, trains: bool) -> None:
        """Take the gradients that no boundary has announced. `trains`: the backward has given gradients."""
        for unit in self.units:
            unit.uses.in_backward = False
            if unit.order in self._bindings.slots:
                self._bindings.unbind_slot(unit)
            is_absent = trains and self._agreement is None and not unit.gradient.finalized and self.counts_as_zero(unit)
            if unit.has_gradient or is_absent:
                self.finalize(unit, at_end=True)
            unit.uses.count_anew() if trains else unit.uses.expect_backward_again()
            unit.gradient.finalized = False

    def end(self) -> None:
        """End the backward, whose gradients are all taken here: agree with the other ranks on the rest."""
        if self._agreement is not None:
            self._agreement.end()
        self.end_joined_backward()

    # ---- the norm of a step ------------------------------------------------------------------------------------------

    def square_sum(self) -> float:
        """Return the square sum of the held gradients over all units and ranks (fp64). Waits for backward to end.

        The sums are combined in the order of the units, so that the value does not depend on which lane finished first.
        """
        self.join()
        self.bring_sums_down()
        context, gradients = self._parts.context, self._gradients
        with context.recorder.stalled("the gradients of the step"):
            context.lanes.d2h.drain()
            context.lanes.update.drain()
        self._note_flags()
        context.ranks.join()  # the gradients of GPU-tier units pass through no lane
        on_device = gradients.sums.cpu()
        return self._totals.now([gradients.square_sums_of(unit, on_device) for unit in self.units])

    def bring_sums_down(self) -> None:
        """Send the GPU sums of all units to their held gradients: of units without a gradient in the last backward, and
        of all where no backward knew that it was the last one."""
        for unit in self.units:
            self._gradients.bring_down(unit)

    def norm_on_device(self) -> torch.Tensor:
        """Return the gradient norm of the last backward as a 0-d fp32 device tensor, without waiting for it."""
        self.join()
        self.bring_sums_down()
        self._note_flags()
        sums = self._gradients.sums
        if not any(unit.gradient.has_sum for unit in self.units):  # otherwise the sums are from the last step
            sums = torch.zeros_like(sums)
        return self._totals.later(sums).sqrt().float()

    def _note_flags(self) -> None:
        """Add the `requires_grad` flags to the digest: each rank updates its part of a parameter, so the flags must be
        equal."""
        ranks = self._parts.context.ranks
        if ranks.world_size > 1:
            ranks.note(each.requires_grad for unit in self.units for each in unit.trained.parameters)

    # ---- several ranks -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Send on their way the gradients that all ranks have announced."""
        if self._agreement is not None:
            self._agreement.look()

    def join(self) -> None:
        """Take part, before a step, in the ends of backwards that gave gradients to other ranks and not to this one."""
        if self._agreement is not None:
            self._parts.context.ranks.meet("a step", in_step=True)

    def abandon(self) -> None:
        """Drop the announced gradients of a backward that has not ended."""
        if self._agreement is not None:
            self._agreement.abandon()

    def leave(self) -> None:
        """Leave the agreement of ranks: the engine ends."""
        if self._agreement is not None:
            self._agreement.leave()

    # The methods that the agreement calls.

    def contribution(self, unit: Unit) -> Contribution:
        """Take the gradients out of the unit's parameters."""
        packed = self._gradients.pack_early(unit)
        if packed is None:  # they wait for other ranks, perhaps until after the next block's backward
            self._parts.spare.activations.captures.take_gradients_back()
        gradients = unit.take_gradients()
        return Contribution(gradients) if packed is None else Contribution([None] * len(gradients), packed)

    def drop_contribution(self, contribution: Contribution) -> None:
        """Give up a contribution, which is not averaged."""
        if contribution.staging is not None:
            self._gradients.drop(contribution.staging)

    def take_agreed(self, unit: Unit, *, final: bool) -> None:
        """Average the gradients that `Unit.gradients` returns, and send them on their way."""
        finalized = unit.gradient.finalized  # since it was announced, or not: its backward may have ended
        self._take(unit, final=final)
        unit.gradient.finalized = finalized

    def forget_agreed(self, unit: Unit) -> None:
        """Forget the gradient that was just averaged: this rank has dropped its own part."""
        unit.gradient.forget()
        self._learning.discard()

    def counts_as_zero(self, unit: Unit) -> bool:
        """Whether a unit without a gradient on any rank is updated as if its gradient was zero."""
        return self.final and not unit.gradient.has_sum and bool(unit.codec.numel)

    def is_final(self) -> bool:
        """Whether the backward under way is the last one before the step."""
        return self.final

    def is_only(self) -> bool:
        """Whether no other backward may come before the step."""
        return self.final and not self.deferred

    def end_joined_backward(self) -> None:
        """End a backward that has ended on all ranks; this rank may have had no gradient in it."""
        updates = not self.deferred and self.final
        self._accumulation.close(at_boundary=self.final, updates=updates)
        if updates:
            self._resident_weights.fetch_updated()
            if self._parts.window is not None:
                self._parts.window.prefetch(None, "forward")
