"""The runtime: connects units, window and lanes, and handles the events of a training step.

    forward     root begins -> block enters (wait for its slot, bind) -> block leaves (unbind, prefetch the next)
    backward    block enters (bind) -> recompute, gradients -> block leaves (unbind, gradient on its way) -> end
    step        updates deferred: they are queued by deadline and run under the next forward
                not deferred: they are under way already, and the step completes its statistics

It knows nothing of DeepSpeed; `ds_slide.integration` drives it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.optim.rule import Hyper
from ds_slide.patching.positions import Positions
from ds_slide.report.statistics import UPDATE
from ds_slide.runtime.access import StateAccess
from ds_slide.runtime.activations.activations import shape_of
from ds_slide.runtime.core import running
from ds_slide.runtime.core.calls import RootState, in_backward, require_no_transform
from ds_slide.runtime.core.compiled_code import is_compiled
from ds_slide.runtime.core.context import AS_THEY_ARE
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.ended import end
from ds_slide.runtime.gradients.taking import Taking
from ds_slide.runtime.memory.parked_states import ParkedStates
from ds_slide.runtime.parts import Parts
from ds_slide.runtime.step.accumulation import Accumulation
from ds_slide.runtime.step.interruptions import Interruptions
from ds_slide.runtime.step.phases import DEFER_HINT, Event
from ds_slide.runtime.weights.bindings import Bindings
from ds_slide.runtime.weights.model_hooks import ModelHooks
from ds_slide.runtime.weights.outputs import OutputEvents
from ds_slide.runtime.weights.resident_weights import ResidentWeights
from ds_slide.runtime.weights.rows import StreamedRows
from ds_slide.runtime.weights.window import Slot
from ds_slide.store.in_memory import KeptOnGpu, NotHeld
from ds_slide.store.tiers import Held


class Newcomers(Protocol):
    """Finds parameters that require a gradient and did not when the engine was built."""

    def look(self) -> None:
        """Give new trainable parameters states, or raise SlideError. Called before a forward with gradients."""
        ...


class SlideRuntime:
    """The runtime of one engine. The compute thread calls all methods."""

    def __init__(self, module: nn.Module, parts: Parts) -> None:
        self._module = module
        self.parts = parts
        self.device = parts.context.device
        self.units = parts.units
        self.blocks = [unit for unit in parts.units if unit.spec.kind == "block"]
        self.root = RootState()
        self.bindings = Bindings(parts)
        self.resident_weights = ResidentWeights(parts, self.bindings, self.root)
        self.rows = None if parts.rows is None else StreamedRows(parts.rows, parts.context, parts.gradients, self)
        """The weight of the streamed outer module, for the module that computes with it."""
        self.parked = ParkedStates(self.device)
        self.accumulation = Accumulation()
        self.interruptions = Interruptions(parts, self.accumulation, self.root, self)
        self.taking = Taking(module, parts, self.accumulation, self.bindings, self.resident_weights)
        self.access = StateAccess(self)
        self.prologue: OutputEvents | None = None
        """The host's handler for the beginning of a backward, which calls `begin_backward`. None: a backward begins by
        itself."""
        self.newcomers: Newcomers | None = None
        self._positions = Positions(module)
        self._is_compiled = False
        """Whether a block was called by compiled code."""
        # The hooks come last: they call the objects above.
        self.hooks = ModelHooks(module, self)
        self.hooks.attach()
        self.resident_weights.bind_all()
        running.close_at_exit(self)

    def start(self) -> None:
        """Fetch the first blocks. Called when all copies to the device so far have arrived."""
        if self.parts.ssd is not None:
            self.parts.ssd.start()
        if self.parts.window is not None:
            self.parts.window.prefetch(None, "forward")

    def release_all(self) -> None:
        """Release all slots after an exception: nothing computes with the bound weights any more."""
        self.parts.spare.end_forward()
        self._positions.end()
        self.access.take_back(self.units)
        self.bindings.release_all(self.units)
        if self.rows is not None:
            self.rows.give_up()
        self.bindings.residents.end_computing()

    # ---- forward ---------------------------------------------------------------------------------------------

    def begin_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        require_no_transform()
        self.hooks.close_left_open()
        self.interruptions.nest()
        self.interruptions.begin_forward(with_gradient=torch.is_grad_enabled())
        self.access.take_back(self.units)
        self.bindings.residents.begin_computing()
        self.taking.doubts.begin_forward(args, kwargs)
        self._positions.begin(args, kwargs)
        if in_backward():
            return  # activations that the backward under way has kept or moved stay as they are
        if self.parts.window is not None:
            may_leave_out = self.parts.window.few_tokens and not torch.is_grad_enabled()
            self.parts.window.begin_forward(self._tokens_of_uncompiled(args, kwargs) if may_leave_out else 0)
        if self.newcomers is not None and torch.is_grad_enabled():
            self.newcomers.look()
        self.parts.spare.begin_forward(args, kwargs)

    def _tokens_of_uncompiled(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Return the number of tokens of a forward; 0 where compiled code may read experts that the engine does not
        know of."""
        if self._is_compiled or any(map(is_compiled, self._around_experts)):
            return 0
        shape = shape_of(args, kwargs)
        return 0 if shape is None else shape.tokens

    @functools.cached_property
    def _around_experts(self) -> list[nn.Module]:
        """The modules whose code reads experts of blocks: a few of all, since each generated token asks for them."""
        experts = (entry.name.split(".") for unit in self.blocks for entry in unit.layout.experts)
        names = {".".join(parts[:count]) for parts in experts for count in range(len(parts))}
        return [module for name, module in self._module.named_modules() if name in names]

    def end_forward(self, *, completed: bool) -> None:
        self._positions.end()
        if not in_backward():
            self.parts.spare.end_forward(completed=completed)
        for unit in self.blocks:  # only after an exception: a block that was entered and never left
            if unit.order in self.bindings.slots and not unit.uses.in_backward:
                self.bindings.unbind_slot(unit)
        if not in_backward() and not (self.parts.context.trains and self._module.training and torch.is_grad_enabled()):
            self.bindings.residents.end_computing()  # otherwise a backward follows, and computing ends with it

    def find_compiled(self, unit: Unit) -> None:
        """Leave a block as it is written that `torch.compile` compiles with what is around it."""
        self.parts.spare.activations.leave_compiled(unit.order)
        self._is_compiled = True
        if self.parts.window is not None:
            self.parts.window.begin_forward(0)

    def enter_forward(self, unit: Unit, *, with_backward: bool) -> None:
        require_no_transform()
        if (compute := self.parts.context.recorder.compute) is not None:
            compute.enter(("forward", unit.order), self.device.mark(timed=True))
        if with_backward:
            self.parts.spare.activations.captures.note_call()  # before the host may wait for weights
        self.interruptions.nest()
        if unit.gradient.finalized and not self.parts.updating.deferred:
            raise SlideError(
                f"a forward of {unit.name} began in a hook of a backward that has updated its weights already, because "
                f"with clipping off weights are updated under backward; {DEFER_HINT}"
            )
        if with_backward:
            unit.uses.begun += 1
        if unit.is_streamed and unit.order not in self.bindings.slots:
            expects_backward = torch.is_grad_enabled() and self.root.expects_backward()
            trains = self.parts.context.trains and (with_backward or expects_backward)
            self.bindings.bind_slot(unit, "forward" if trains else "inference")
        if unit.resident is not None and unit.carried:
            unit.note_carried_writes()
        if self.resident_weights.are_fetched:
            for resident in (unit, *unit.parts):
                self.resident_weights.bind_if_fetched(resident)
        if with_backward:
            self.parts.spare.activations.captures.note_begin()
        self.parts.spare.activations.times.enter(unit.order)

    def leave_forward(self, unit: Unit) -> None:
        if (compute := self.parts.context.recorder.compute) is not None:
            compute.leave(("forward", unit.order), self.device.mark(timed=True))
        if not unit.uses.in_backward:
            self.bindings.unbind_slot(unit)
            autocasts = torch.is_autocast_enabled(self.device.torch.type)
            if autocasts and any(part.dtype == torch.float32 for part in (unit, *unit.parts)):
                # Autocast would keep its copies of the block's weights in lower precision on the GPU until the forward
                # of the whole model has ended.
                torch.clear_autocast_cache()

    # ---- backward --------------------------------------------------------------------------------------------

    def enter_backward(self, unit: Unit) -> Slot | None:
        """Bind the unit's weights until `leave_backward`."""
        # Not in `begin_backward`, which DeepSpeed may call before the forward has run: the time of a forward ends where
        # the first block's backward begins.
        self.parts.updating.passes.begin_backward()
        self.accumulation.require(Event.BLOCK_BACKWARD)
        self.interruptions.begin_backward_of_block()
        if not torch.is_grad_enabled():  # not inside of a recomputation
            self.taking.look()
        self.parts.spare.activations.enter_backward(unit.order)
        if (compute := self.parts.context.recorder.compute) is not None:
            compute.enter(("backward", unit.order), self.device.mark(timed=True))
        unit.uses.in_backward = True
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
        if not unit.uses.raw:
            unit.uses.in_backward = False
            self.bindings.unbind_slot(unit)
        if torch.is_grad_enabled():
            self.parts.spare.activations.captures.note_second_derivative()
            return  # a backward with create_graph: the block's use ends with the backward of the new graph
        unit.uses.ended += 1
        if unit.uses.ended >= unit.uses.begun and (
            self.parts.updating.deferred or not self.accumulation.backward.is_nested
        ):
            with AS_THEY_ARE():
                self.taking.finalize_block(unit)

    def end_use(self, unit: Unit) -> None:
        """End a use whose gradient does not come through a boundary: of rows, of a head, of an outer module."""
        unit.uses.ended += 1
        if unit.uses.ended >= unit.uses.begun and unit.spec.kind == "block" and self.accumulation.is_open:
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
        """Prepare for the first gradient. `hypers`, `grad_scale`: the values of the coming step if nothing is clipped.
        Updates that begin before the step use them.
        `of_another`: why the next step may belong to another engine (`Doubts.of_another`)."""
        if in_backward():
            self.accumulation.require(Event.BLOCK_BACKWARD)
            self.resident_weights.bind_fetched()  # for a graph older than a step: no forward has bound them since
        self.interruptions.begin_backward()
        self.taking.doubts.of_another = of_another
        self.bindings.residents.begin_computing()
        self.parts.gradients.hypers, self.parts.gradients.grad_scale = tuple(hypers), grad_scale

    def set_final(self, final: bool) -> None:
        """Set whether the backward under way is the last one before the step."""
        self.taking.final = final

    def end_backward(self) -> None:
        """Take, after the last gradient, the gradients that came through no `_Boundary` (outer modules, blocks with
        frozen inputs)."""
        if self.accumulation.is_over:
            return  # called as the end of a backward that has ended with an exception
        # The end of an accumulation may be announced without a backward, and counts.
        ends_sum = not self.accumulation.is_open and self.accumulation.micro_batches > 0
        with AS_THEY_ARE():
            trains = ends_sum or self.taking.has_gradients()
            self.taking.finalize_rest(trains=trains)
        self.bindings.residents.end_computing()
        self.taking.doubts.end_backward()
        if not trains:  # other ranks may have had no such backward; otherwise see `Taking.join`
            self.accumulation.leave_out()
            return
        self.taking.end()

    # ---- step ------------------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Optimizer steps so far, including the steps of a loaded checkpoint."""
        return self.accumulation.steps

    def orthogonalize(self, hypers: Sequence[Hyper], grad_scale: float) -> None:
        """Replace held gradients, times `grad_scale`, by Muon's updates, before the step that applies these."""
        try:
            with self.parts.context.recorder.stalled("Muon's updates of the step"):
                self.parts.updating.orthogonalize(self.units, hypers, grad_scale)
        except BaseException:
            self.accumulation.interrupt_step()  # some momentum has advanced
            raise

    def step(self, hypers: Sequence[Hyper], grad_scale: float) -> None:
        """Apply the update. With held gradients all units are queued by deadline. Otherwise the updates of host units
        are under way."""
        self.parked.bring_all_back(self.units)  # otherwise no unit is updated
        self.taking.bring_sums_down()
        counts = self.parts.updating.speculating.begin_step(
            self.units, hypers, grad_scale, self.parts.gradients.grad_scale
        )
        # What has been done ahead is whole. With some rules the new states depend on the old weights.
        self._choose_passes(whole=counts or not all(hyper.two_passes for hyper in hypers))
        try:
            self.parts.updating.prepare(self.units, hypers)
            with self.parts.context.ranks.in_one_place():  # all ranks have added up the norm of this step
                self._apply(hypers, grad_scale)
            for unit in self.parts.learning.fitted_units():
                self.access.settle(unit)
            self.parts.learning.adopt()
        except BaseException:
            self.accumulation.interrupt_step()
            raise
        self.parts.updating.passes.end_step()
        self.accumulation.clear()
        self.accumulation.steps += 1
        self.parts.context.recorder.end_step(self.step_count)
        self.parts.spare.end_step()

    def _choose_passes(self, *, whole: bool) -> None:
        """Choose the passes of the updates that the step queues. `whole`: they cannot have two. With several
        micro-batches the next backward does not wait for the second passes of units whose gradients the GPU adds
        up."""
        updated = [unit for unit in self.units if unit.is_uploaded and unit.trainable]
        backwards, latest = self.accumulation.micro_batches, self.parts.context.recorder.latest
        due = [unit for unit in updated if backwards < 2 or unit.gradient.gpu_sum is None]
        numel = sum(unit.codec.numel for unit in updated)
        self.parts.updating.passes.begin_step(
            backwards=backwards,
            reach=1 - min((unit.order for unit in due), default=0) / len(self.units),
            due=sum(unit.codec.numel for unit in due) / numel if numel else 1.0,
            idle_s=0.0 if latest is None else latest.step_s - latest.lanes[UPDATE]["busy_s"],
            whole=whole,
        )

    def _apply(self, hypers: Sequence[Hyper], grad_scale: float) -> None:
        for unit in self.units:
            if not unit.gradient.has_sum:
                continue
            unit.gradient.forget()
            match unit.state.gradient:
                case KeptOnGpu(gradient=kept):
                    self._update_on_gpu(unit, hypers, grad_scale, kept.tensor)
                case Held() as held:
                    self.parts.updating.queue(unit, hypers, grad_scale, held)
                case NotHeld():
                    pass  # its update has been queued when the gradient arrived
                case other:
                    raise AssertionError(other)
        if self.parts.updating.deferred:
            self.resident_weights.fetch_updated()
            if self.parts.window is not None:
                self.parts.window.prefetch(None, "forward")

    def discard_gradients(self) -> None:
        """Forget the gradients since the last step (overflow, `zero_grad`)."""
        self.accumulation.require(Event.DISCARD)
        self.access.take_back(self.units)
        self.parts.updating.speculating.skip_step()
        self.parts.updating.passes.drop(self.accumulation.micro_batches)
        self.parts.learning.discard()
        self.taking.abandon()
        for unit in self.units:
            unit.gradient.forget()
        self.accumulation.clear()

    def forget_gradients(self) -> None:
        """Drop the gradients accumulated since the last step (`zero_grad`), if any. Raises SlideError if they have been
        applied already."""
        self.interruptions.notice()
        self.accumulation.require(Event.ZERO_GRAD)
        if any(unit.gradient.has_sum for unit in self.units):
            self.discard_gradients()
        self.accumulation.clear()

    def _update_on_gpu(self, unit: Unit, hypers: Sequence[Hyper], grad_scale: float, gradient: torch.Tensor) -> None:
        self.device.wait(unit.gradient.arrived.wait())
        self.parts.updating.update_on_gpu(unit, gradient, hypers, grad_scale)
        unit.mark_changed()
        if unit.is_gathered:
            self.resident_weights.gather(unit)
        else:
            self.resident_weights.bind_where_replaced(unit)

    def close(self) -> None:
        """Run the queued work, end the threads, remove the hooks. Harmless when called twice."""
        end(self)
