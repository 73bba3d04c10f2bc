"""The runtime: connects units, window and lanes, and handles the events of a training step.

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
from ds_slide.runtime.activations.checkpointing import CacheHooks
from ds_slide.runtime.core import running
from ds_slide.runtime.core.calls import RootState, in_backward
from ds_slide.runtime.core.clients import AS_THEY_ARE
from ds_slide.runtime.core.futures import Future, wait_on_stream
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.ended import ENDED, close_lanes, free_memory, why_incomplete
from ds_slide.runtime.gradients.learning import Learning
from ds_slide.runtime.gradients.streamed_gradient import StreamedGradient
from ds_slide.runtime.gradients.taking import Taking
from ds_slide.runtime.gradients.totals import Totals
from ds_slide.runtime.memory.parked_states import ParkedStates
from ds_slide.runtime.parts import Parts
from ds_slide.runtime.step.accumulation import Accumulation
from ds_slide.runtime.step.interruptions import Interruptions
from ds_slide.runtime.step.phases import HOLD_HINT, Event, Phase
from ds_slide.runtime.updates.apply import device_update
from ds_slide.runtime.weights.bindings import Bindings
from ds_slide.runtime.weights.function_transforms import require_no_transform
from ds_slide.runtime.weights.hooks import BlockHooks, OuterHooks, RootHooks
from ds_slide.runtime.weights.outputs import OutputEvents
from ds_slide.runtime.weights.resident_weights import ResidentWeights
from ds_slide.runtime.weights.rows import StreamedRows
from ds_slide.runtime.weights.saved_weights import SavedWeights
from ds_slide.runtime.weights.wide_hooks import WideHooks
from ds_slide.runtime.weights.window import Slot
from ds_slide.store.tiers import Ways


class Newcomers(Protocol):
    """Finds parameters that require a gradient and did not when the engine was built."""

    def look(self) -> None:
        """Give new trainable parameters states, or raise SlideError. Called before a forward with gradients."""
        ...


class SlideRuntime:
    """The runtime of one engine. The compute thread calls all methods."""

    def __init__(self, module: nn.Module, parts: Parts) -> None:
        self.parts = parts
        self.device = parts.context.device
        self.units = parts.units
        self.blocks = [unit for unit in parts.units if unit.spec.kind == "block"]
        self.passes = parts.updating.passes
        self.speculating = parts.updating.speculating
        self.gradients = parts.gradients
        self.learning = Learning(parts.units, parts.context, self)
        self.bindings = Bindings(parts)
        self.residents = self.bindings.residents
        self._window = parts.window
        self.rows = None if parts.rows is None else StreamedRows(parts.rows, parts.context, parts.gradients, self)
        """The weight of the streamed outer module, for the module that computes with it."""
        self._root = RootState()
        self.parked = ParkedStates(parts.context.device)
        self.accumulation = Accumulation()
        self.interruptions = Interruptions(parts, self.accumulation, self._root, self)
        self.resident_weights = ResidentWeights(parts, self.bindings, self._root)
        self.taking = Taking(module, parts, self.accumulation, self.learning, self.bindings, self.resident_weights)
        self.has_ended = False
        self.spoiled = ""
        """Why the weights that an ended engine has left are not whole; empty where they are."""
        self._totals = Totals(parts.context.ranks, self.device, [unit.state.writes_change for unit in parts.units])
        self._module = module
        # The hooks come last: they call the objects above.
        self.prologue: OutputEvents | None = None
        """The host's handler for the beginning of a backward, which calls `begin_backward`. None: a backward begins by
        itself."""
        self.newcomers: Newcomers | None = None
        by_storage = {} if self._window is None else self._window.by_storage
        self._saved = SavedWeights(by_storage, self.bindings.slots, self)
        self.hooks: list[BlockHooks | RootHooks | OuterHooks | WideHooks | CacheHooks] = []
        self.attach()
        self.resident_weights.bind_all()
        self._at_exit = running.close_at_exit(self)

    def attach(self) -> None:
        """Put new hooks into the model, in place of the present ones. Without hooks the model computes with the content
        of its parameters (whole weights, gathered for generation)."""
        self.detach()
        outer_units = [unit for unit in self.units if unit.spec.kind == "outer"]
        self.hooks = [
            *(BlockHooks(unit, self, self._saved, self._root) for unit in self.blocks),
            *OuterHooks.on(self._module, outer_units, self.resident_weights),
            *WideHooks.on(self._module, self.units, self.device.torch.type),
            RootHooks(self._module, self._root, self),
            *CacheHooks.on(self._module, self.parts.spare.activations.leave_unasked),
        ]

    @property
    def is_attached(self) -> bool:
        """Whether the hooks are in the model: a script may have taken them out one by one."""
        return any(isinstance(hooks, RootHooks) and hooks.are_there for hooks in self.hooks)

    def detach(self) -> None:
        """Take the hooks out of the model."""
        self.parts.spare.end_forward()
        for hooks in self.hooks:
            hooks.remove()
        self.hooks = []

    def start(self) -> None:
        """Fetch the first blocks. Called when all copies to the device so far have arrived."""
        if self.parts.ssd is not None:
            self.parts.ssd.start()
        if self._window is not None:
            self._window.prefetch(None, "forward")

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of the whole model is under way."""
        return self._root.active

    def release_all(self) -> None:
        """Release all slots after an exception: nothing computes with the bound weights any more."""
        self.parts.spare.end_forward()
        self.take_back(self.units)
        self.bindings.release_all(self.units)
        if self.rows is not None:
            self.rows.give_up()
        self.residents.end_computing()

    def wait(self, future: Future) -> None:
        """Make the compute stream wait for a transfer, and record the time of the wait."""
        wait_on_stream(future, self.device, self.parts.context.recorder)

    # ---- forward ---------------------------------------------------------------------------------------------

    def begin_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        require_no_transform()
        for hooks in self.hooks:
            if isinstance(hooks, BlockHooks | WideHooks):
                hooks.close_left_open()
        self.interruptions.nest()
        self.interruptions.begin_forward(with_gradient=torch.is_grad_enabled())
        self.take_back(self.units)
        self.residents.begin_computing()
        self.taking.doubts.begin_forward(args, kwargs)
        if in_backward():
            return  # activations that the backward under way has kept or moved stay as they are
        if self.newcomers is not None and torch.is_grad_enabled():
            self.newcomers.look()
        self.parts.spare.begin_forward(args, kwargs)

    def end_forward(self, *, completed: bool) -> None:
        if not in_backward():
            self.parts.spare.end_forward(completed=completed)
        for unit in self.blocks:  # only after an exception: a block that was entered and never left
            if unit.order in self.bindings.slots and not unit.in_backward:
                self.bindings.unbind_slot(unit)
        if not in_backward() and not (self.parts.context.trains and self._module.training and torch.is_grad_enabled()):
            self.residents.end_computing()  # otherwise a backward follows, and computing ends with it

    def find_compiled(self, unit: Unit) -> None:
        """Leave a block as it is written that `torch.compile` compiles with what is around it."""
        self.parts.spare.activations.leave_compiled(unit.order)

    def enter_forward(self, unit: Unit, *, with_backward: bool) -> None:
        require_no_transform()
        if (compute := self.parts.context.recorder.compute) is not None:
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
            trains = self.parts.context.trains and (with_backward or expects_backward)
            self.bindings.bind_slot(unit, "forward" if trains else "inference")
        for resident in (unit, *unit.parts):
            self.resident_weights.bind_if_fetched(resident)
        self.parts.spare.activations.times.enter(unit.order)

    def leave_forward(self, unit: Unit) -> None:
        if (compute := self.parts.context.recorder.compute) is not None:
            compute.leave(("forward", unit.order), self.device.mark(timed=True))
        if not unit.in_backward:
            self.bindings.unbind_slot(unit)
            is_wide = any(part.dtype == torch.float32 for part in (unit, *unit.parts))
            if is_wide and torch.is_autocast_enabled(self.device.torch.type):
                # Autocast would keep its copies of the block's weights in lower precision on the GPU until the forward
                # of the whole model has ended.
                torch.clear_autocast_cache()

    # ---- backward --------------------------------------------------------------------------------------------

    def enter_backward(self, unit: Unit) -> Slot | None:
        """Bind the unit's weights until `leave_backward`."""
        self.passes.begin_backward()  # `begin_backward` may be called before the forward, too
        self.accumulation.require(Event.BLOCK_BACKWARD)
        self.interruptions.begin_backward_of_block()
        if not torch.is_grad_enabled():  # not inside of a recomputation
            self.taking.look()
        self.parts.spare.activations.enter_backward(unit.order)
        if (compute := self.parts.context.recorder.compute) is not None:
            compute.enter(("backward", unit.order), self.device.mark(timed=True))
        unit.in_backward = True
        if not unit.is_streamed:
            return None
        return self.bindings.bind_for_backward(unit)

    def visit(self, unit: Unit) -> Slot:
        """Bind a block for a node of a graph that a backward with `create_graph` has made."""
        self.interruptions.begin_backward_of_block()
        return self.bindings.visit(unit)

    def leave_backward(self, unit: Unit) -> None:
        if (compute := self.parts.context.recorder.compute) is not None:
            compute.leave(("backward", unit.order), self.device.mark(timed=True))
        if not unit.raw:
            unit.in_backward = False
            self.bindings.unbind_slot(unit)
        if torch.is_grad_enabled():
            return  # a backward with create_graph: the block's use ends with the backward of the new graph
        unit.uses_done += 1
        if unit.uses_done >= unit.uses and (self.deferred or not self.accumulation.backward.is_nested):
            with AS_THEY_ARE():
                self.taking.finalize_block(unit)

    def end_use(self, unit: Unit) -> None:
        """End a use whose gradient has come in another way than by the backward of its module."""
        unit.uses_done += 1
        if unit.uses_done >= unit.uses and unit.spec.kind == "block" and self.accumulation.is_open:
            self.taking.finalize_block(unit)

    def on_output_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Begin a backward, if it has not begun, when a gradient reaches an output of the model."""
        if self.prologue is not None:
            return self.prologue.on_output_gradient(gradient)
        self.interruptions.begin_backward()
        return gradient

    def begin_backward(
        self, hypers: Sequence[Hyper], grad_scale: float = 1.0, *, of_another: str | None = None
    ) -> None:
        """Prepare for the first gradient. `hypers`, `grad_scale`: the values of the coming step, if clipping is off.
        `of_another`: why the next step may belong to another engine (`Doubts.of_another`)."""
        if in_backward():
            self.accumulation.require(Event.BLOCK_BACKWARD)
            self.resident_weights.bind_fetched()  # for a graph older than a step: no forward has bound them since
        self.interruptions.begin_backward()
        self.taking.doubts.of_another = of_another
        self.residents.begin_computing()
        self.gradients.hypers, self.gradients.grad_scale = tuple(hypers), grad_scale

    def set_final(self, final: bool) -> None:
        """Set whether the backward under way is the last one before the step."""
        self.taking.final = final

    def end_backward(self) -> None:
        """Take, after the last gradient, the gradients that no boundary has announced (outer modules, blocks with
        frozen inputs)."""
        if self.accumulation.is_over:
            return  # called as the end of a backward that has ended with an exception
        # The end of an accumulation may be announced without a backward, and counts.
        ends_sum = not self.accumulation.is_open and self.accumulation.micro_batches > 0
        with AS_THEY_ARE():
            trains = ends_sum or self.taking.has_gradients()
            self.taking.finalize_rest(trains=trains)
        self.residents.end_computing()
        self.taking.doubts.end_backward()
        if not trains:  # other ranks may have had no such backward; otherwise see `Taking.join`
            self.accumulation.leave_out()
            return
        self.taking.end()

    def begin_streamed_gradient(self, unit: Unit, gradient: StreamedGradient) -> None:
        """Take the gradient of `unit` from `gradient` from now on, while its backward is still making it."""
        self.taking.finalize(unit, gradient)

    # ---- step ------------------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Optimizer steps so far, including the steps of a loaded checkpoint."""
        return self.accumulation.steps

    @property
    def deferred(self) -> bool:
        """Whether gradients wait for the step."""
        return self.taking.deferred

    def square_sum(self) -> float:
        """Return the square sum of the held gradients over all units and ranks (fp64). Waits for backward to end.

        The sums are combined in the order of the units, so that the value does not depend on which lane finished first.
        """
        self.taking.join()
        with self.parts.context.recorder.stalled("the gradients of the step"):
            self.parts.context.lanes.d2h.drain()
            self.parts.context.lanes.update.drain()
        self._note_flags()
        self.parts.context.ranks.join()  # the gradients of GPU-tier units pass through no lane
        on_device = self.gradients.sums.cpu()
        return self._totals.now([self.gradients.square_sums_of(unit, on_device) for unit in self.units])

    def _note_flags(self) -> None:
        """Add the `requires_grad` flags to the digest: each rank updates its part of a parameter, so the flags must be
        equal."""
        if self.parts.context.ranks.world_size > 1:
            self.parts.context.ranks.note(each.requires_grad for unit in self.units for each in unit.trained.parameters)

    def norm_on_device(self) -> torch.Tensor:
        """Return the gradient norm of the last backward as a 0-d fp32 device tensor, without waiting for it."""
        self.taking.join()
        self._note_flags()
        sums = self.gradients.sums
        if not any(unit.gradient_ready for unit in self.units):  # otherwise the sums are from the last step
            sums = torch.zeros_like(sums)
        return self._totals.later(sums).sqrt().float()

    def step(self, hypers: Sequence[Hyper], grad_scale: float) -> None:
        """Apply the update. With held gradients all units are queued by deadline. Otherwise the updates of host units
        are under way."""
        self.parked.bring_all_back(self.units)  # otherwise no unit is updated
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
        self.accumulation.clear()
        self.accumulation.steps += 1
        self.parts.context.recorder.end_step(self.step_count)
        self.parts.spare.end_step()

    def _reach_of_updates(self) -> float:
        """Return the part of a backward until the last unit that the host updates."""
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
                    at_once=lambda: None,  # the update is under way
                )
            )
        if self.deferred:
            self.resident_weights.fetch_updated()
            if self._window is not None:
                self._window.prefetch(None, "forward")

    def discard_gradients(self) -> None:
        """Forget the gradients of this accumulation window (overflow, `zero_grad`)."""
        self.accumulation.require(Event.DISCARD)
        self.take_back(self.units)
        self.speculating.skip_step()
        self.learning.discard()
        self.taking.abandon()
        for unit in self.units:
            unit.gradient_ready = False
        self.accumulation.clear()

    def forget_gradients(self) -> None:
        """Drop the gradients accumulated since the last step (`zero_grad`), if any. Raises SlideError if they have been
        applied already."""
        self.interruptions.notice()
        self.accumulation.require(Event.ZERO_GRAD)
        if any(unit.gradient_ready for unit in self.units):
            self.discard_gradients()
        self.accumulation.clear()

    def resume_after(self, step: int, counts: Mapping[str, int]) -> None:
        """Continue after step number `step`. `counts`: the updates of parameters with another count, by name."""
        self.accumulation.steps = step
        for unit in self.units:
            unit.trained.counts = [counts.get(entry.name, step) for _, entry in unit.trainable]

    def own_counts(self) -> dict[str, int]:
        """Return the number of updates of parameters that were not updated in every step, by name."""
        return {
            entry.name: count
            for unit in self.units
            for (_, entry), count in zip(unit.trainable, unit.trained.counts, strict=True)
            if count != self.step_count
        }

    def states_loaded(self) -> None:
        """Forget an interrupted step, because weights and optimizer states have come from a checkpoint."""
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
        """Raise SlideError where the engine has ended: its optimizer states are gone."""
        if self.has_ended:
            raise SlideError(f"{what} is refused: {ENDED}")

    def why_spoiled(self) -> str:
        """Return why the present weights are not the result of a whole step; empty where they are."""
        why = self.interruptions.why_spoiled()
        if not why and self.accumulation.phase is Phase.UPDATED:
            why = "it has updated weights under a backward() that no engine.step() has followed"
        return why

    def settle(self, unit: Unit) -> None:
        """Wait until the unit's state buffers belong to the caller: its pending update and transfers have run, and a
        speculative update is taken back."""
        self.take_back((unit,))
        self.parked.bring_back(unit)
        unit.arrived.synchronize()
        unit.state.settle(unit.completed.synchronize)
        if unit.chunk_rows:
            # A forward that has been submitted may still be reading the state buffer.
            self.parts.context.lanes.outer_h2d.drain()
        self.resident_weights.await_fetched(unit)

    def take_back(self, units: Sequence[Unit]) -> None:
        """Undo the units' speculative updates, bit by bit, and wait for the end."""
        self.bindings.take_back(units)

    def reload_weights(self) -> None:
        """Renew every GPU copy: the state buffers may have been written from outside (a checkpoint was loaded)."""
        for unit in self.units:
            self.weights_changed(unit)
        if self._window is not None:
            self._window.prefetch(None, "forward")

    def begin_writing(self) -> None:
        """Wait until no other rank reads the weights. They have settled, and are about to be written from outside.
        Collective where weights are shared: every rank calls it, even if it then writes none of its own weights."""
        if self.parts.context.shared is not None:
            self.parts.context.lanes.h2d.drain()
            self.parts.context.lanes.outer_h2d.drain()
            self.parts.context.ranks.exchange(None, "waiting until no rank reads the weights that are to be written")

    def weights_changed(self, unit: Unit) -> None:
        """Refresh the GPU copies of the unit's state buffers, which the caller has written (after `settle`).
        Collective."""
        unit.version += 1
        unit.publish(unit.version)
        unit.state.drain()
        self.resident_weights.renew(unit)

    def close(self) -> None:
        """Run the queued work, end the threads, remove the hooks. Harmless when called twice."""
        running.leave(self)
        self.taking.leave()
        atexit.unregister(self._at_exit)
        if not self.has_ended:
            self.spoiled = self.why_spoiled()
        # The model keeps its weights as they are after the last confirmed update.
        self.detach()
        with suppress(SlideError):  # the failure of a lane, which has been reported
            self.take_back(self.units)
        self.parked.forget()
        if self.rows is not None:
            self.rows.close()
        self.resident_weights.unbind_all()
        why = self.parts.context.failures.message
        try:
            with self.parts.context.failures.waiting("the engine to end"):
                self.parts.spare.activations.close()
                close_lanes(self.parts)
                self.device.synchronize()
                for pool in self.parts.context.allocator.pools.values():
                    pool.close()
                self.parts.context.recorder.close()
        finally:
            # A later call of this engine would wait for lanes that have ended.
            self.parts.context.failures.end(ENDED)
            if self.parts.watchdog is not None:
                self.parts.watchdog.close(why)
            if not self.has_ended:
                self.has_ended = True
                self.spoiled = self.spoiled or why_incomplete(self.units)
                free_memory(self.parts)
