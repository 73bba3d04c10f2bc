"""The runtime: units, window and lanes wired together, and the events of a training step.

    forward     root begins -> block enters (wait for its slot, bind) -> block leaves (unbind, prefetch the next)
    backward    block enters (bind) -> recompute, gradients -> block leaves (unbind, gradient on its way) -> end
    step        updates deferred: they are queued by deadline and run under the next forward
                not deferred: they are under way already, and the step completes its statistics

It knows nothing of DeepSpeed; `ds_slide.integration` drives it.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.optim.rule import Hyper
from ds_slide.runtime import running
from ds_slide.runtime.accumulation import Accumulation
from ds_slide.runtime.activations.checkpointing import CacheHooks
from ds_slide.runtime.activations.parked_states import ParkedStates
from ds_slide.runtime.ended import ENDED, free_memory, why_incomplete
from ds_slide.runtime.gradients.holding import HOLD_HINT
from ds_slide.runtime.gradients.streamed_gradient import StreamedGradient
from ds_slide.runtime.gradients.taking import Taking
from ds_slide.runtime.interruptions import Interruptions
from ds_slide.runtime.learning import Learning
from ds_slide.runtime.parts import Parts
from ds_slide.runtime.totals import Totals
from ds_slide.runtime.transfers.handoff import Future, wait_on_stream
from ds_slide.runtime.unit import Unit
from ds_slide.runtime.updates.apply import device_update
from ds_slide.runtime.weights.bindings import Bindings
from ds_slide.runtime.weights.calls import in_backward
from ds_slide.runtime.weights.function_transforms import require_no_transform
from ds_slide.runtime.weights.hooks import BlockHooks, OuterHooks, RootHooks, RootState
from ds_slide.runtime.weights.outputs import OnGradient
from ds_slide.runtime.weights.resident_weights import ResidentWeights
from ds_slide.runtime.weights.residents import AS_THEY_ARE, Availability
from ds_slide.runtime.weights.rows import StreamedRows
from ds_slide.runtime.weights.saved_weights import SavedWeights
from ds_slide.runtime.weights.wide_hooks import WideHooks
from ds_slide.runtime.weights.window import Slot
from ds_slide.store.tiers import Ways


class Newcomers(Protocol):
    """Finds parameters that require a gradient and did not when the engine was built."""

    def look(self) -> None:
        """Before a forward with gradients: give them states, or raise SlideError."""
        ...


class SlideRuntime:
    """All methods are called by the thread that computes."""

    def __init__(self, module: nn.Module, parts: Parts, availability: Availability) -> None:
        self.parts = parts
        self.device = parts.device
        self.units = parts.units
        self.blocks = [unit for unit in parts.units if unit.spec.kind == "block"]
        self.passes = parts.updating.passes
        self.speculating = parts.updating.speculating
        self.gradients = parts.gradients
        self.learning = Learning(parts.units, self.settle, parts.ranks, parts.device)
        self.bindings = Bindings(parts, availability)
        self.residents = self.bindings.residents
        self._window = parts.window
        self.rows: StreamedRows | None = None if parts.make_rows is None else parts.make_rows(self)
        """The weight of the outer module that is not on the GPU as a whole, for the module that computes with it."""
        self._root = root = RootState()
        self.parked = ParkedStates(parts.device)
        self.accumulation = Accumulation()
        self.interruptions = Interruptions(
            self.accumulation,
            parts.units,
            self._root,
            parts.ranks,
            parts.failures,
            self._release_all,
            deferred=parts.deferred,
        )
        self.resident_weights = ResidentWeights(parts, self.bindings, lambda: root.active or in_backward())
        self.taking = Taking(
            module,
            parts,
            self.accumulation,
            self.interruptions,
            self.learning,
            self.bindings,
            self.resident_weights,
        )
        self.has_ended = False
        self.spoiled = ""
        """Why the weights that an ended engine has left are no whole weights; empty where they are."""
        self._totals = Totals(parts.ranks, self.device, [unit.state.writes_change for unit in parts.units])
        self._module = module
        self.on_output_gradient: OnGradient = self._begin_backward
        """Called with each gradient that reaches an output of the model; the integration puts DeepSpeed's prologue
        here."""
        self.newcomers: Newcomers | None = None
        by_storage = {} if self._window is None else self._window.by_storage
        self._saved = SavedWeights(by_storage, self.bindings.slots, self)
        self.hooks: list[BlockHooks | RootHooks | OuterHooks | WideHooks | CacheHooks] = []
        self.attach()
        self.resident_weights.bind_all()
        self._at_exit = running.close_at_exit(self)

    def attach(self) -> None:
        """Put the hooks into the model, in place of those that are there: without them the model computes with what
        its parameters hold (whole ones, gathered for generation)."""
        self.detach()
        outer_units = [unit for unit in self.units if unit.spec.kind == "outer"]
        self.hooks = [
            *(BlockHooks(unit, self, self._saved, self._root) for unit in self.blocks),
            *OuterHooks.on(self._module, outer_units, self.resident_weights.bind_if_fetched),
            *WideHooks.on(self._module, self.units, self.device.torch.type),
            RootHooks(
                self._module,
                self._root,
                self._begin_forward,
                self._end_forward,
                lambda gradient: self.on_output_gradient(gradient),
            ),
            *CacheHooks.on(self._module, self.parts.spare.activations.leave_unasked),
        ]

    @property
    def is_attached(self) -> bool:
        """Whether the hooks are in the model: a script may have taken them out one by one."""
        return any(isinstance(hooks, RootHooks) and hooks.are_there for hooks in self.hooks)

    def detach(self) -> None:
        """Take them out."""
        self.parts.spare.end_forward()
        for hooks in self.hooks:
            hooks.remove()
        self.hooks = []

    def start(self) -> None:
        """Fetch the first blocks. Called when everything that was put on the device so far has arrived there."""
        if self.parts.ssd is not None:
            self.parts.ssd.start()
        if self._window is not None:
            self._window.prefetch(None, "forward")

    @property
    def is_in_forward(self) -> bool:
        """Whether one of the whole model is under way."""
        return self._root.active

    def _release_all(self) -> None:
        """Release all slots after an exception: nothing computes any more with what is bound."""
        self.parts.spare.end_forward()
        self.take_back(self.units)
        self.bindings.release_all(self.units)
        if self.rows is not None:
            self.rows.give_up()
        self.residents.end_computing()

    def wait(self, future: Future) -> None:
        """Make the compute stream wait for a transfer, and book the time it stands still."""
        wait_on_stream(future, self.device, self.parts.recorder.stalled)

    # ---- forward ---------------------------------------------------------------------------------------------

    def _begin_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        require_no_transform()
        for hooks in self.hooks:
            if isinstance(hooks, BlockHooks | WideHooks):
                hooks.close_left_open()
        self.interruptions.nest()
        self.interruptions.begin_forward(with_gradient=torch.is_grad_enabled())
        self.take_back(self.units)
        if self.taking.unstepped:
            raise SlideError(
                "a forward began after backward() at an accumulation boundary and before engine.step(), but the "
                f"weights are being updated under backward; call engine.step() first, or {HOLD_HINT}"
            )
        self.residents.begin_computing()
        self.taking.doubts.begin_forward(args, kwargs)
        if in_backward():
            return  # what the backward under way has kept, and has moved, stays as it is
        if self.newcomers is not None and torch.is_grad_enabled():
            self.newcomers.look()
        self.parts.spare.begin_forward(args, kwargs)

    def _end_forward(self, *, completed: bool) -> None:
        if not in_backward():
            self.parts.spare.end_forward(completed=completed)
        for unit in self.blocks:  # only after an exception: a block that was entered and never left
            if unit.order in self.bindings.slots and not unit.in_backward:
                self.bindings.unbind_slot(unit)
        if not in_backward() and not (self.parts.trains and self._module.training and torch.is_grad_enabled()):
            self.residents.end_computing()  # otherwise a backward is to come, and its end is the end

    def enter_forward(self, unit: Unit, *, with_backward: bool) -> None:
        require_no_transform()
        if (compute := self.parts.recorder.compute) is not None:
            compute.enter(("forward", unit.order), self.device.mark(timed=True))
        self.interruptions.nest()
        if unit.finalized and not self.deferred:
            raise SlideError(
                f"a forward of {unit.name} began in a hook of a backward that has updated its weights already, because "
                f"with clipping off weights are updated under backward; {HOLD_HINT}"
            )
        if with_backward:
            unit.uses += 1
        if unit.is_streamed and unit.order not in self.bindings.slots:
            expects_backward = torch.is_grad_enabled() and self._root.expects_backward()
            trains = self.parts.trains and (with_backward or expects_backward)
            self.bindings.bind_slot(unit, "forward" if trains else "inference")
        for resident in (unit, *unit.parts):
            self.resident_weights.bind_if_fetched(resident)
        self.parts.spare.activations.times.enter(unit.order)

    def leave_forward(self, unit: Unit) -> None:
        if (compute := self.parts.recorder.compute) is not None:
            compute.leave(("forward", unit.order), self.device.mark(timed=True))
        if not unit.in_backward:
            self.bindings.unbind_slot(unit)
            is_wide = any(part.dtype == torch.float32 for part in (unit, *unit.parts))
            if is_wide and torch.is_autocast_enabled(self.device.torch.type):
                # Autocast would keep the copies in lower precision that it has made of the block's weights, on the GPU,
                # until the forward of the whole model has ended.
                torch.clear_autocast_cache()

    # ---- backward --------------------------------------------------------------------------------------------

    def enter_backward(self, unit: Unit) -> Slot | None:
        """The unit's weights are bound from here to `leave_backward`."""
        self.passes.begin_backward()  # `begin_backward` may be called before the forward, too
        self.taking.require_only_backward()
        self.interruptions.begin_backward_of_block()
        if not torch.is_grad_enabled():  # not inside of what is computed again
            self.taking.look()
        self.parts.spare.activations.enter_backward(unit.order)
        if (compute := self.parts.recorder.compute) is not None:
            compute.enter(("backward", unit.order), self.device.mark(timed=True))
        unit.in_backward = True
        if not unit.is_streamed:
            return None
        return self.bindings.bind_for_backward(unit)

    def visit(self, unit: Unit) -> Slot:
        """A node of a graph that a backward with `create_graph` has made needs the weights of a block."""
        self.interruptions.begin_backward_of_block()
        return self.bindings.visit(unit)

    def leave_backward(self, unit: Unit) -> None:
        if (compute := self.parts.recorder.compute) is not None:
            compute.leave(("backward", unit.order), self.device.mark(timed=True))
        if not unit.raw:
            unit.in_backward = False
            self.bindings.unbind_slot(unit)
        if torch.is_grad_enabled():
            return  # of a backward with create_graph: the block's use ends with the backward of what that makes
        unit.uses_done += 1
        if unit.uses_done >= unit.uses and (self.deferred or not self.accumulation.is_nested):
            with AS_THEY_ARE():
                self.taking.finalize_block(unit)

    def end_use(self, unit: Unit) -> None:
        """A gradient of the unit has come by another way than the backward of its module."""
        unit.uses_done += 1
        if unit.uses_done >= unit.uses and unit.spec.kind == "block" and self.accumulation.is_open:
            self.taking.finalize_block(unit)

    def _begin_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self.interruptions.begin_backward()
        return gradient

    def begin_backward(
        self, hypers: Sequence[Hyper], grad_scale: float = 1.0, *, of_another: str | None = None
    ) -> None:
        """Prepare for the first gradient. `hypers`, `grad_scale`: of the coming step, if it clips nothing.
        `of_another`: why the step that follows may be another engine's (`Doubts.of_another`)."""
        if in_backward():
            self.taking.require_only_backward()
            self.resident_weights.bind_fetched()  # of a graph older than a step: no forward has bound them since
        self.interruptions.begin_backward()
        self.taking.doubts.of_another = of_another
        self.residents.begin_computing()
        self.gradients.hypers, self.gradients.grad_scale = tuple(hypers), grad_scale

    def set_final(self, final: bool) -> None:
        """Whether the backward under way is the last one before the step."""
        self.taking.final = final

    def end_backward(self) -> None:
        """Take, after the last gradient, what no boundary has announced (outer modules, blocks with frozen inputs)."""
        if self.accumulation.is_over:
            return  # what follows a backward that has ended with an exception, as its end
        # The end of an accumulation may be announced without a backward, and counts.
        ends_sum = not self.accumulation.is_open and self.accumulation.micro_batches > 0
        with AS_THEY_ARE():
            trains = ends_sum or self.taking.has_gradients()
            self.taking.finalize_rest(trains=trains)
        self.residents.end_computing()
        self.taking.doubts.end_backward()
        if not trains:  # other ranks may have had no such backward; where they had, see `Taking.join`
            self.accumulation.leave_out()
            return
        self.taking.end()

    def begin_streamed_gradient(self, unit: Unit, gradient: StreamedGradient) -> None:
        """Take the gradient of `unit` from there from now on, while its backward is still making it."""
        self.taking.finalize(unit, gradient)

    # ---- step ------------------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Optimizer steps so far, those of a checkpoint included."""
        return self.accumulation.steps

    @property
    def deferred(self) -> bool:
        """Whether gradients wait for the step."""
        return self.taking.deferred

    def square_sum(self) -> float:
        """Square sum of the held gradients over all units and ranks (fp64). Waits for backward to end.

        Combined in the order of the units, so that the value does not depend on which lane finished first.
        """
        self.taking.join()
        with self.parts.recorder.stalled("the gradients of the step"):
            self.parts.workers.d2h.drain()
            self.parts.workers.update.drain()
        self._note_flags()
        self.parts.ranks.join()  # GPU-tier units have been through no lane
        on_device = self.gradients.sums.cpu()
        return self._totals.now([self.gradients.square_sums_of(unit, on_device) for unit in self.units])

    def _note_flags(self) -> None:
        """Each rank updates its part of a parameter, so all ranks must have it on, or all off."""
        if self.parts.ranks.world_size > 1:
            self.parts.ranks.note(each.requires_grad for unit in self.units for each in unit.trained.parameters)

    def norm_on_device(self) -> torch.Tensor:
        """Gradient norm of the last backward as a 0-d fp32 device tensor, without waiting for it."""
        self.taking.join()
        self._note_flags()
        sums = self.gradients.sums
        if not any(unit.gradient_ready for unit in self.units):  # else they are the last step's
            sums = torch.zeros_like(sums)
        return self._totals.later(sums).sqrt().float()

    def step(self, hypers: Sequence[Hyper], grad_scale: float) -> None:
        """Apply the update. Held gradients: queue all units by deadline. Otherwise the host units are under way."""
        self.parked.bring_all_back(self.units)  # or no unit is updated
        counts = self.speculating.begin_step(self.units, hypers, grad_scale, self.gradients.grad_scale)
        self.passes.begin_step(
            backwards=max(1, self.accumulation.micro_batches), reach=self._reach_of_updates(), speculated=counts
        )
        try:
            self._apply(hypers, grad_scale)
            self.learning.adopt()
        except BaseException:
            self.accumulation.interrupt_step()
            raise
        self.passes.end_step()
        self.taking.unstepped = False
        self.accumulation.clear()
        self.accumulation.steps += 1
        self.parts.recorder.end_step(self.step_count)
        self.parts.spare.end_step()

    def _reach_of_updates(self) -> float:
        """The part of a backward until the last unit that the host updates."""
        updated = (unit.order for unit in self.units if unit.is_uploaded and unit.trainable)
        return 1 - min(updated, default=0) / len(self.units)

    def _apply(self, hypers: Sequence[Hyper], grad_scale: float) -> None:
        for unit in self.units:
            if not unit.gradient_ready:
                continue
            unit.gradient_ready = False
            unit.state.gradient.choose(
                Ways(
                    on_gpu=functools.partial(self._update_on_gpu, unit, hypers, grad_scale),
                    held=functools.partial(self.parts.updating.queue, unit, hypers, grad_scale),
                    at_once=lambda: None,  # it is under way
                )
            )
        if self.deferred:
            self.resident_weights.fetch_updated()
            if self._window is not None:
                self._window.prefetch(None, "forward")

    def discard_gradients(self) -> None:
        """Forget the gradients of this accumulation window (overflow, `zero_grad`)."""
        if self.taking.unstepped:
            raise SlideError(f"the gradients cannot be discarded: their updates are under way; {HOLD_HINT}")
        self.take_back(self.units)
        self.speculating.skip_step()
        self.learning.discard()
        self.taking.abandon()
        for unit in self.units:
            unit.gradient_ready = False
        self.accumulation.clear()

    def forget_gradients(self) -> None:
        """Drop what was accumulated since the last step (`zero_grad`), if anything was. SlideError where it has been
        applied already."""
        self.interruptions.notice()
        self.accumulation.require_weights()
        if any(unit.gradient_ready for unit in self.units):
            self.discard_gradients()
        self.accumulation.clear()

    def resume_after(self, step: int, counts: Mapping[str, int]) -> None:
        """Go on after step number `step`. `counts`: updates of the parameters that have had others, by name."""
        self.accumulation.steps = step
        for unit in self.units:
            unit.trained.counts = [counts.get(entry.name, step) for _, entry in unit.trainable]

    def own_counts(self) -> dict[str, int]:
        """Updates of the parameters that have not been updated in every step, by name."""
        return {
            entry.name: count
            for unit in self.units
            for (_, entry), count in zip(unit.trainable, unit.trained.counts, strict=True)
            if count != self.step_count
        }

    def states_loaded(self) -> None:
        """Weights and optimizer states have come from a checkpoint: nothing of an interrupted step is left in them."""
        self.discard_gradients()
        self.accumulation.reload()
        for unit in self.units:
            unit.mark_changed()

    def _update_on_gpu(self, unit: Unit, hypers: Sequence[Hyper], grad_scale: float, gradient: torch.Tensor) -> None:
        self.device.wait(unit.arrived.wait())
        device_update(unit, gradient, unit.trained.begin(hypers), grad_scale)
        unit.mark_changed()
        if unit.is_gathered:
            self.resident_weights.gather(unit)

    # ---- reading and writing states --------------------------------------------------------------------------

    def is_bound(self, unit: Unit) -> bool:
        """Whether the unit's parameters point into a slot right now."""
        return unit.order in self.bindings.slots

    def require_running(self, what: str) -> None:
        """SlideError where the engine has ended: its optimizer states are gone."""
        if self.has_ended:
            raise SlideError(f"{what} is refused: {ENDED}")

    def why_spoiled(self) -> str:
        """Why the weights, as they are now, are not those of a step; empty where they are."""
        why = self.interruptions.why_spoiled()
        if not why and self.taking.unstepped:
            why = "it has updated weights under a backward() that no engine.step() has followed"
        return why

    def settle(self, unit: Unit) -> None:
        """Wait until the unit's state buffers belong to the caller: its pending update and transfers have run, and an
        update that no step has confirmed is taken back."""
        self.take_back((unit,))
        self.parked.bring_back(unit)
        unit.arrived.synchronize()
        unit.state.settle(unit.completed.synchronize)
        if unit.chunk_rows:
            # A forward that has been submitted may still be reading the state buffer.
            self.parts.workers.outer_h2d.drain()
        self.resident_weights.await_fetched(unit)

    def take_back(self, units: Sequence[Unit]) -> None:
        """Give the units the bits that they had before updates that no step has confirmed, and wait for that."""
        self.bindings.take_back(units)

    def reload_weights(self) -> None:
        """The state buffers may have been written from outside (a checkpoint was loaded): every GPU copy is renewed."""
        for unit in self.units:
            self.weights_changed(unit)
        if self._window is not None:
            self._window.prefetch(None, "forward")

    def begin_writing(self) -> None:
        """Wait until no other rank reads the weights, which have settled and are about to be written from outside.
        Collective where weights are shared: every rank calls it, whichever of its own weights it then writes."""
        if self.parts.shared is not None:
            self.parts.workers.h2d.drain()
            self.parts.workers.outer_h2d.drain()
            self.parts.ranks.exchange(None, "waiting until no rank reads the weights that are to be written")

    def weights_changed(self, unit: Unit) -> None:
        """The caller has written the unit's state buffers (after `settle`): refresh what the GPU holds of them.
        Collective."""
        unit.version += 1
        unit.publish(unit.version)
        unit.state.drain()
        self.resident_weights.renew(unit)

    def close(self) -> None:
        """Run what is queued, end the threads, remove the hooks. Harmless when called twice."""
        running.leave(self)
        self.taking.leave()
        atexit.unregister(self._at_exit)
        if not self.has_ended:
            self.spoiled = self.why_spoiled()
        self.detach()
        with suppress(SlideError):  # of a lane that has failed, which has been told
            self.take_back(self.units)
        self.parked.forget()
        if self.rows is not None:
            self.rows.close()
        self.resident_weights.unbind_all()
        why = self.parts.failures.message
        try:
            with self.parts.failures.waiting("the engine to end"):
                self.parts.spare.activations.close()
                self.parts.workers.close(self.parts.ssd, self.parts.shared, self.parts.failures)
                self.device.synchronize()
                for pool in self.parts.pools.values():
                    pool.close()
                self.parts.recorder.close()
        finally:
            # Whoever goes on with this engine would wait for lanes that are gone.
            self.parts.failures.end(ENDED)
            if self.parts.watchdog is not None:
                self.parts.watchdog.close(why)
            if not self.has_ended:
                self.has_ended = True
                self.spoiled = self.spoiled or why_incomplete(self.units)
                free_memory(self.parts)
