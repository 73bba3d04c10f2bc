"""The hooks that the model calls: they enclose every use of a block, in forward and in backward.

In forward they are plain module hooks. For backward, the inputs of a block pass through `_Boundary`, an identity whose
backward runs when autograd has finished everything the block did with them: autograd takes the newest ready node first,
and every node of the block is newer than its boundary. The other end, the first gradient that reaches an output, is a
multi-grad hook. The hooks do not depend on which parameters received a gradient, so unused parameters need no special
case.

Activation checkpointing recomputes a block inside backward. Such a forward (`calls` recognises it) binds the weights as
the block's backward does, and leaves them bound for the backward.

A block without a differentiable input has no boundary. Its use ends with its last gradient (`uses`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

from ds_slide.report.statistics import StepRecorder
from ds_slide.runtime.core.calls import (
    Call,
    RootState,
    call_under_way,
    function_around,
    in_backward,
    is_in_vmap,
    mapped,
    unwrapped,
)
from ds_slide.runtime.core.compiled_code import uncompiled
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.weights.outputs import OutputEvents, hook_outputs
from ds_slide.runtime.weights.passed import Passed, add_differentiable, differentiable, fields_in, tensors_of
from ds_slide.runtime.weights.resident_weights import ResidentWeights
from ds_slide.runtime.weights.saved_weights import OpenHooks, SavedWeights, hooks_around
from ds_slide.runtime.weights.uses import UseToken, WholeGradients, give_to, token_of_recomputation
from ds_slide.runtime.weights.window import Slot


class BlockEvents(Protocol):
    """The receiver of a block's events. All calls come from the compute thread."""

    def find_compiled(self, unit: Unit) -> None: ...
    def enter_forward(self, unit: Unit, *, with_backward: bool) -> None: ...
    def leave_forward(self, unit: Unit) -> None: ...
    def enter_backward(self, unit: Unit) -> Slot | None: ...
    def leave_backward(self, unit: Unit) -> None: ...


class RootEvents(OutputEvents, Protocol):
    """The receiver of events of the whole model's forward."""

    def begin_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None: ...
    def end_forward(self, *, completed: bool) -> None: ...


class _Boundary(torch.autograd.Function):
    """Identity on a block's differentiable inputs. `done` runs when all of their gradients are complete."""

    # Without `setup_context`, for which torch would look at the signature of `forward` in each call: 25 us.

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.done = done
        ctx.set_materialize_grads(False)  # an input that the block has not used gets no gradient, not zeros
        # These are new tensors on the same storage: returning the inputs themselves would make them views of each
        # other.
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.done()
        return (None, *gradients)

    @staticmethod
    def jvp(_ctx: Any, _done: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


_cross = super(torch.autograd.Function, _Boundary).apply
"""`_Boundary.apply` without what it does for transforms of torch.func: a third of its time."""


def _gradients_enter(output: Any, given: Any, known: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a module's output through which gradients reach it. If plain containers in the output have
    none, its objects are searched, and the objects that the module was `given` and may have changed. Tensors in `known`
    are left out."""
    leaves = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
    found = [leaf for leaf in leaves if differentiable(leaf)]
    if found:
        return found
    if is_in_vmap():  # autograd is below vmap, so its wrappers require no gradient
        tensors = [unwrapped(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return [tensor for tensor in tensors if differentiable(tensor)]
    before = {id(tensor) for tensor in known}
    inside = tensors_of(fields_in(output)) or tensors_of(fields_in(given))
    return [tensor for tensor in inside if id(tensor) not in before]


def _on_first_gradient(
    output: Any, hook: Callable[[Any], None], given: Any = None, known: Sequence[torch.Tensor] = ()
) -> None:
    """Call `hook` once in each backward, when the first gradient reaches a tensor of a module's output."""
    if not torch.is_grad_enabled():
        return
    if isinstance(output, torch.Tensor) and output.requires_grad:  # mostly
        output.register_hook(hook)
        return
    outputs = _gradients_enter(output, given, known)
    if len(outputs) == 1:
        outputs[0].register_hook(hook)
    elif outputs:
        register_multi_grad_hook(outputs, hook, mode="any")


class _Forward:
    """One call of a block, from its beginning to its end. An object is made for each call, so rare values are set only
    where they occur."""

    call = Call.FORWARD
    raw = False
    """Whether it saves weights as they are: they stay bound until its backward has ended."""
    token: UseToken | None = None
    """The token of a use that no boundary ends."""
    passed: Passed | None = None
    """The tensors that have gone through the boundary."""
    given: Any = None
    """The arguments, if the block may return nothing and change them."""


def _direction() -> str:
    return "backward" if in_backward() else "forward"


class BlockHooks:
    """Hooks of one block."""

    def __init__(
        self, unit: Unit, events: BlockEvents, saved: SavedWeights, root: RootState, recorder: StepRecorder
    ) -> None:
        assert unit.spec.module is not None
        self._unit = unit
        self._events = events
        self._saved = saved
        self._root = root
        self._recorder = recorder
        self._open: OpenHooks | None = None
        self._forward: _Forward | None = None
        self._whole_gradients = WholeGradients(unit, events)
        module = unit.spec.module
        self._handles = [
            module.register_forward_pre_hook(uncompiled(self._before, self._found_compiled), with_kwargs=True),
            # always_call: an exception inside the block must not leave its slot bound for ever.
            module.register_forward_hook(uncompiled(self._after), always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._whole_gradients.give_up()

    def _found_compiled(self) -> None:
        self._events.find_compiled(self._unit)

    def close_left_open(self) -> None:
        """Take the hooks for saved tensors away, if they are still there: an interrupt (Ctrl-C) ends a forward without
        a call of any hook, not even of hooks with `always_call`."""
        if self._open is not None:
            self._open.close()
            self._open = None

    # The hooks that torch calls. While steps are recorded, they measure what the work below costs the host.

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if (host := self._recorder.host) is None:
            return self._begin(args, kwargs)
        with host.own(_direction(), self._unit.order, begins=True):
            return self._begin(args, kwargs)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if (host := self._recorder.host) is None:
            return self._end(output)
        with host.own(what := _direction(), self._unit.order, ends=what == "forward"):
            return self._end(output)

    def _reach_output(self, token: UseToken | None, _gradient: Any) -> None:
        if (host := self._recorder.host) is None:
            self._enter_backward(token)
            return
        with host.own("backward", self._unit.order, begins=True):
            self._enter_backward(token)

    def _reach_boundary(self, forward: _Forward, token: UseToken | None) -> None:
        if (host := self._recorder.host) is None:
            self._leave_backward(forward, token)
            return
        with host.own("backward", self._unit.order, ends=True):
            self._leave_backward(forward, token)

    # The work of the hooks.

    def _begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._open is not None:
            self.close_left_open()
        unit = self._unit
        self._forward = forward = _Forward()
        is_new = True
        if in_backward():
            forward.call = call_under_way()
            is_new = forward.call is Call.FORWARD
        elif self._whole_gradients.awaited:
            self._whole_gradients.give_up()
        inputs: list[torch.Tensor] = []
        add_differentiable(inputs, args)
        add_differentiable(inputs, kwargs.values())
        with_graph = torch.is_grad_enabled()
        counted = is_new and (with_graph or self._root.expects_backward())
        context = None
        if counted and not with_graph:
            context = function_around(self._root.call)
            counted = context is not None
        counted = counted and (bool(inputs) or unit.trains or not with_graph)
        if is_new:
            self._events.enter_forward(unit, with_backward=counted)
        else:
            self._events.enter_backward(unit)
        unit.uses.computing += 1
        token = UseToken(unit) if counted else None
        if not with_graph:
            if context is not None and token is not None:
                give_to(context, token)
            return args, kwargs
        is_streamed = unit.is_streamed
        if not is_streamed and forward.call is Call.SAVED_TENSORS:
            return args, kwargs  # nothing is bound, and the new graph is dropped
        if forward.call is Call.REENTRANT:
            token = token_of_recomputation(unit)
        args, kwargs = self._through_boundary(forward, inputs, token, args, kwargs)
        # Weights that are always on the GPU are saved as they are. Tensors saved by a re-entrant recomputation need no
        # reference either: the weights stay bound until its backward has ended. Only one block can stay bound like
        # this; if several are recomputed together, the others may have to give up their slots.
        if is_streamed:
            stays = forward.call is Call.REENTRANT and forward.passed is not None and hooks_around() is None
            if stays and not self._saved.has_raw():
                forward.raw = True
                unit.uses.raw += 1
            else:
                self._open = self._saved.open(self._recorder.host, unit.order)
        return args, kwargs

    def _through_boundary(
        self, forward: _Forward, inputs: list[torch.Tensor], token: UseToken | None, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        fields = fields_in(args, kwargs) if not inputs else []
        inputs = inputs or tensors_of(fields)
        if fields or not inputs:
            forward.given = (args, kwargs)
        if not inputs or is_in_vmap():
            forward.token = token
            return args, kwargs
        cross = _Boundary.apply if torch._C._are_functorch_transforms_active() else _cross
        through = cross(functools.partial(self._reach_boundary, forward, token), *inputs)
        forward.passed = Passed(inputs, through, fields)
        if fields:
            return args, kwargs
        if len(inputs) == 1 and args and args[0] is inputs[0]:  # mostly the hidden states are the only input
            return (through[0], *args[1:]), kwargs
        rest = iter(through)
        return mapped(lambda leaf: next(rest) if differentiable(leaf) else leaf, (args, kwargs))

    def _end(self, output: Any) -> Any:
        """End the call and return its output, which outlives the block's time in its slot."""
        if self._open is not None:
            self.close_left_open()
        unit, forward = self._unit, self._forward
        if forward is None:  # another hook has raised before `_before`
            return None
        self._forward = None
        unit.uses.computing = max(0, unit.uses.computing - 1)
        passed, given = forward.passed, forward.given
        forward.passed = forward.given = None  # the boundary's node holds `forward`, and must not hold itself
        known: Sequence[torch.Tensor] = ()
        if passed is not None:
            known = passed.inputs
            passed.hand_back()
        if unit.is_streamed:
            output = self._saved.copied(output)
        if forward.call is Call.FORWARD:
            self._events.leave_forward(unit)
        elif forward.call is Call.SAVED_TENSORS or passed is not None:
            return output  # the block's backward has begun, and its boundary will end it
        _on_first_gradient(output, functools.partial(self._reach_output, forward.token), given, known)
        return output

    def _enter_backward(self, token: UseToken | None) -> None:
        """Begin the backward. `token`: the token of a use that ends with the block's last gradient."""
        self._events.enter_backward(self._unit)
        if token is not None:
            self._whole_gradients.end(token)

    def _leave_backward(self, forward: _Forward, token: UseToken | None) -> None:
        if forward.raw:
            self._unit.uses.raw = max(0, self._unit.uses.raw - 1)
        if token is None:
            self._events.leave_backward(self._unit)
        else:
            token.fire(self._events)


class OuterHooks:
    """Hooks of a module that owns parameters of an outer module. They wait for its weights when it runs, not before."""

    def __init__(self, module: nn.Module, units: Sequence[Unit], weights: ResidentWeights) -> None:
        self._units = units
        self._weights = weights
        self._handle = module.register_forward_pre_hook(uncompiled(self._before))

    @classmethod
    def on(cls, root: nn.Module, outer_units: Sequence[Unit], weights: ResidentWeights) -> list[OuterHooks]:
        """Return hooks for every module below `root` that owns parameters of an outer module directly."""
        owner = {id(parameter): unit for unit in outer_units for parameter in unit.parameters}
        hooks = []
        for module in root.modules():
            own = {owner[id(p)].order: owner[id(p)] for p in module.parameters(recurse=False) if id(p) in owner}
            if own:
                hooks.append(cls(module, list(own.values()), weights))
        return hooks

    def remove(self) -> None:
        self._handle.remove()

    def _before(self, module: nn.Module, args: Any) -> None:
        for unit in self._units:
            self._weights.bind_if_fetched(unit)


class RootHooks:
    """Hooks of the whole model, which open and close the forward. A wrapper's `generate` (PEFT's) calls the model in
    it, which has such hooks, too; inside of another forward they do nothing."""

    def __init__(
        self,
        module: nn.Module,
        root: RootState,
        events: RootEvents,
    ) -> None:
        self.are_there = True
        self._has_begun = False
        self._root = root
        self._events = events
        self._handles = [
            module.register_forward_pre_hook(uncompiled(self._before), with_kwargs=True),
            module.register_forward_hook(uncompiled(self._after), always_call=True),
        ]

    def remove(self) -> None:
        self.are_there = False
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if call_under_way() is Call.FORWARD and (not self._root.active or self._root.is_left_open()):
            self._events.begin_forward(args, kwargs)
            self._root.begin(sys._getframe(2))  # the caller of `uncompiled`
            self._has_begun = True

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if call_under_way() is Call.FORWARD:
            if not self._root.active or not self._has_begun:
                return None
            self._has_begun = False
            self._root.end()
            self._events.end_forward(completed=output is not None)
        return hook_outputs(output, self._events) if torch.is_grad_enabled() else None
