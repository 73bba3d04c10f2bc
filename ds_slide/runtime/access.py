"""The one door for readers and writers from outside: scripts, the host framework, checkpoints, moves of states.

`settle` waits until a unit's state buffers belong to the caller. Whoever writes them calls `begin_writing` before and
`weights_changed` afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ds_slide.errors import SlideError
from ds_slide.model.layout import Entry
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.core.update import SquareSum
from ds_slide.runtime.step.phases import DEFER_HINT, Event, Phase

if TYPE_CHECKING:
    from ds_slide.runtime.engine import SlideRuntime

ENDED = "this engine has ended, by destroy() or by a later deepspeed.initialize of its model; use the new one"


class StateAccess:
    """Access to the states of one engine. The compute thread calls all methods."""

    def __init__(self, runtime: SlideRuntime) -> None:
        self._runtime = runtime
        self._parts = runtime.parts
        self.has_ended = False
        self.spoiled = ""
        """Why the weights that an ended engine has left are not whole; empty where they are."""

    # ---- what may be read --------------------------------------------------------------------------------------------

    def require_running(self, what: str) -> None:
        """Raise SlideError where the engine has ended: its optimizer states are gone."""
        if self.has_ended:
            raise SlideError(f"{what} is refused: {ENDED}")

    def why_spoiled(self) -> str:
        """Return why the present weights are not the result of a whole step; empty where they are."""
        why = self._runtime.interruptions.why_spoiled()
        if not why and self._runtime.accumulation.phase is Phase.UPDATED:
            why = "it has updated weights under a backward() that no engine.step() has followed"
        return why

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of the whole model is under way."""
        return self._runtime.root.active

    def is_bound(self, unit: Unit) -> bool:
        """Whether the unit's parameters point into a slot right now."""
        return unit.order in self._runtime.bindings.slots

    # ---- reading and writing -----------------------------------------------------------------------------------------

    def settle(self, unit: Unit) -> None:
        """Wait until the unit's state buffers belong to the caller: its pending update and transfers have run, and a
        speculative update is taken back."""
        self.take_back((unit,))
        self._runtime.parked.bring_back(unit)
        self._parts.gradients.bring_down(unit)
        unit.gradient.arrived.synchronize()
        with unit.state.settling():
            unit.completed.synchronize()
        if unit.chunk_rows:
            # A forward that has been submitted may still be reading the state buffer.
            self._parts.context.lanes.outer_h2d.drain()
        self._runtime.resident_weights.await_fetched(unit)

    def take_back(self, units: Sequence[Unit]) -> None:
        """Undo the units' speculative updates, bit by bit, and wait for the end."""
        self._parts.updating.speculating.take_back(units, self._parts.window)

    def begin_writing(self) -> None:
        """Wait until no other rank reads the weights. They have settled, and are about to be written from outside.
        Collective where weights are shared: every rank calls it, even if it then writes none of its own weights."""
        if any(unit.layout.experts for unit in self._parts.units):
            self._parts.context.lanes.h2d.drain()  # a forward that has been submitted may still be reading experts
        if self._parts.context.shared is not None:
            self._parts.context.lanes.h2d.drain()
            self._parts.context.lanes.outer_h2d.drain()
            what = "waiting until no rank reads the weights that are to be written"
            self._parts.context.ranks.exchange(None, what)

    def weights_changed(self, unit: Unit) -> None:
        """Refresh the GPU copies of the unit's state buffers, which the caller has written (after `settle`).
        Collective."""
        unit.version += 1
        if unit.shared is not None:
            unit.shared.publish(unit, unit.version)
        unit.state.drain()
        self._runtime.resident_weights.renew(unit)

    def reload_weights(self) -> None:
        """Renew every GPU copy: the state buffers may have been written from outside (a checkpoint was loaded)."""
        for unit in self._runtime.units:
            self.weights_changed(unit)
        if self._parts.window is not None:
            self._parts.window.prefetch(None, "forward")

    # ---- counts of updates, and states of a checkpoint ---------------------------------------------------------------

    def resume_after(self, step: int, counts: Mapping[str, int]) -> None:
        """Continue after step number `step`. `counts`: the updates of parameters with another count, by name."""
        self._runtime.accumulation.steps = step
        for unit in self._runtime.units:
            unit.trained.counts = [counts.get(entry.name, step) for _, entry in unit.trainable]

    def own_counts(self) -> dict[str, int]:
        """Return the number of updates of parameters that were not updated in every step, by name."""
        return {
            entry.name: count
            for unit in self._runtime.units
            for (_, entry), count in zip(unit.trainable, unit.trained.counts, strict=True)
            if count != self._runtime.step_count
        }

    def states_loaded(self) -> None:
        """Forget an interrupted step, because weights and optimizer states have come from a checkpoint."""
        self._runtime.discard_gradients()
        self._runtime.accumulation.reload()
        for unit in self._runtime.units:
            unit.mark_changed()

    # ---- gradients of some parameters --------------------------------------------------------------------------------

    def drop_gradients(self, given: Collection[int], *, to_none: bool) -> None:
        """Drop the gradients of the parameters with the `id`s `given`.

        `to_none`: if all parameters of a unit are given, the unit has no gradient afterwards, and the step leaves it
        alone. Otherwise the gradients become zero, which a step applies. SlideError where they have been applied
        already.
        """
        self._runtime.interruptions.notice()
        self._runtime.accumulation.require(Event.ZERO_GRAD)
        for unit in self._runtime.units:
            entries = [entry for parameter, entry in unit.trainable if id(parameter) in given]
            if not unit.gradient.has_sum or not entries:
                continue
            if not unit.state.has("gradient"):
                raise SlideError(
                    f"the gradients cannot be discarded: the update of {unit.name} is under way; {DEFER_HINT}"
                )
            self.take_back((unit,))
            if to_none and len(entries) == len(unit.trainable):
                unit.gradient.forget()
            else:
                self._zero(unit, entries)
        if not any(unit.gradient.has_sum for unit in self._runtime.units):
            self._runtime.accumulation.clear()

    def _zero(self, unit: Unit, entries: Sequence[Entry]) -> None:
        if unit.state.writes_change and len(entries) < len(unit.trainable):
            raise SlideError(
                f"zero_grad of a part of {unit.name}: its gradients are compressed together (ds_slide.compression); "
                "call engine.zero_grad(), which drops those of the whole model"
            )
        self.settle(unit)
        self._parts.context.lanes.update.drain()  # an accumulation may be under way
        if len(entries) == len(unit.trainable):
            unit.state.zero_gradient()
        else:
            zero = torch.zeros(1, dtype=unit.state.dtype_of("gradient"))
            for entry in entries:
                span = slice(entry.offset, entry.offset + entry.partition_numel)
                unit.state.write("gradient", span, zero.expand(entry.partition_numel))
        unit.gradient.square_sum = SquareSum()
