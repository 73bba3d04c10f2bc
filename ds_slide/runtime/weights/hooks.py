"""What the model calls: module hooks that bracket every use of a block, in forward and in backward.

Forward brackets are plain module hooks. For backward, the inputs of a block pass through `_Boundary`, an
identity whose backward runs when autograd has finished everything the block did with them: autograd takes
the newest ready node first, and every node of the block is newer than its boundary. The other end, the first
gradient that reaches an output, is a multi-grad hook. Nothing is inferred from which parameters received a
gradient, so unused ones need no special case.

Activation checkpointing recomputes a block inside backward. Such a forward is recognised by the running
autograd graph task; it binds the weights like the block's backward, and leaves them bound for it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

from ds_slide.runtime.trees import add_tensors
from ds_slide.runtime.unit import Unit
from ds_slide.runtime.weights.outputs import OnGradient, hook_outputs
from ds_slide.runtime.weights.saved_weights import OpenHooks, SavedWeights, hooks_around
from ds_slide.runtime.weights.window import Slot


class BlockEvents(Protocol):
    """Who listens. All calls come from the thread that computes."""

    def enter_forward(self, unit: Unit, *, with_backward: bool) -> None: ...
    def leave_forward(self, unit: Unit) -> None: ...
    def enter_backward(self, unit: Unit) -> Slot | None: ...
    def leave_backward(self, unit: Unit) -> None: ...


class _Boundary(torch.autograd.Function):
    """Identity on a block's differentiable inputs. `done` runs when all of their gradients are complete."""

    generate_vmap_rule = True

    @staticmethod
    def forward(_done: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # New tensors on the same storage: returning the inputs themselves would make them views of each other.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.done = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.done()
        return (None, *gradients)

    @staticmethod
    def jvp(_ctx: Any, _done: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


NO_TASK = -1


def graph_task() -> int:
    """The autograd graph that the calling thread is running, NO_TASK when there is none."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Whether the calling thread is running an autograd graph (so a forward here is a recomputation)."""
    return graph_task() != NO_TASK


def _is_opaque(node: Any) -> bool:
    # Only plain containers are taken apart: a key-value cache, which transformers may register as a tree, would come
    # back as another object, and what the block writes into it would be lost.
    return not isinstance(node, tuple | list | dict)


def _mapped(function: Callable[[Any], Any], node: Any) -> Any:
    """`node` with `function` of each leaf in its place."""
    # What torch's tree_map does, in half the time for the usual containers: it is called twice in each block's forward.
    kind = type(node)
    if kind is tuple:
        return tuple([_mapped(function, each) for each in node])
    if kind is list:
        return [_mapped(function, each) for each in node]
    if kind is dict:
        return {key: _mapped(function, each) for key, each in node.items()}
    return function(node) if _is_opaque(node) else pytree.tree_map(function, node, is_leaf=_is_opaque)


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex())


def _on_first_gradient(output: Any, call: Callable[[], None]) -> None:
    """Call once in each backward, when the first gradient reaches a tensor of a module's output."""
    if output is None or not torch.is_grad_enabled():
        return
    leaves = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
    outputs = [leaf for leaf in leaves if _is_differentiable(leaf)]
    if len(outputs) == 1:
        outputs[0].register_hook(lambda _: call())
    elif outputs:
        register_multi_grad_hook(outputs, lambda _: call(), mode="any")


class BlockHooks:
    """Hooks of one block."""

    def __init__(self, unit: Unit, events: BlockEvents, saved: SavedWeights, root: RootState) -> None:
        assert unit.spec.module is not None
        self._unit = unit
        self._events = events
        self._saved = saved
        self._root = root
        self._open: OpenHooks | None = None
        module = unit.spec.module
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            # always_call: an exception inside the block must not leave its slot bound for ever.
            module.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def close_left_open(self) -> None:
        """Take the hooks for saved tensors away, if that has not happened: an interrupt (Ctrl-C) ends a forward without
        a call of any hook, not even of those that are for always."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.close_left_open()
        given: list[torch.Tensor] = []
        add_tensors(given, args, _is_opaque)
        add_tensors(given, kwargs, _is_opaque)
        inputs = [tensor for tensor in given if _is_differentiable(tensor)]
        counted = False
        if in_backward():
            self._events.enter_backward(self._unit)
        else:
            counted = (bool(inputs) or self._unit.trains) and self._root.expects_backward()
            self._events.enter_forward(self._unit, with_backward=counted)
        if inputs and torch.is_grad_enabled():
            leave = self._events.leave_backward
            if counted:
                token = UseToken(self._unit)
                done = functools.partial(token.fire, leave)
            else:
                done = functools.partial(leave, self._unit)
            through = _Boundary.apply(done, *inputs)
            if len(inputs) == 1 and args and args[0] is inputs[0]:  # mostly the hidden states are the only one
                args = (through[0], *args[1:])
            else:
                rest = iter(through)
                args, kwargs = _mapped(lambda leaf: next(rest) if _is_differentiable(leaf) else leaf, (args, kwargs))
        # Weights that are on the GPU all the time are saved as they are. What a re-entrant recomputation saves needs no
        # reference either: the weights stay bound until its backward has ended.
        if self._unit.is_streamed and torch.is_grad_enabled() and (not in_backward() or hooks_around() is not None):
            self._open = self._saved.open()
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.close_left_open()
        if in_backward():
            return
        self._events.leave_forward(self._unit)
        _on_first_gradient(output, self._enter_backward)

    def _enter_backward(self) -> None:
        self._events.enter_backward(self._unit)


class OuterHooks:
    """Hooks of a module that owns parameters of an outer module: its weights are waited for when it runs, not
    before."""

    def __init__(self, module: nn.Module, units: Sequence[Unit], bind: Callable[[Unit], None]) -> None:
        self._units = units
        self._bind = bind
        self._handle = module.register_forward_pre_hook(self._before)

    @classmethod
    def on(cls, root: nn.Module, outer_units: Sequence[Unit], bind: Callable[[Unit], None]) -> list[OuterHooks]:
        """One for every module below `root` that owns outer module parameters directly."""
        owner = {id(parameter): unit for unit in outer_units for parameter in unit.parameters}
        hooks = []
        for module in root.modules():
            own = {owner[id(p)].order: owner[id(p)] for p in module.parameters(recurse=False) if id(p) in owner}
            if own:
                hooks.append(cls(module, list(own.values()), bind))
        return hooks

    def remove(self) -> None:
        self._handle.remove()

    def _before(self, module: nn.Module, args: Any) -> None:
        for unit in self._units:
            self._bind(unit)


class UseToken:
    """Stands for one use of a unit in a graph. A graph that is dropped without a backward takes its use back:
    otherwise the unit would wait for it, and keep its gradients on the GPU until backward has ended."""

    __slots__ = ("_counting", "_fired", "_unit")

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._counting = unit.counting
        self._fired = -1

    def fire(self, leave_backward: Callable[[Unit], None]) -> None:
        # A backward with create_graph leaves the use to the one that follows.
        self._fired = -1 if torch.is_grad_enabled() else self._unit.left_out
        leave_backward(self._unit)

    def __del__(self) -> None:
        if not hasattr(self, "_fired"):  # torch.compile makes one without its constructor
            return
        is_done = self._fired == self._unit.left_out
        if not is_done and self._counting == self._unit.counting:
            self._unit.uses = max(0, self._unit.uses - 1)


class RootState:
    """Whether a forward of the whole model is under way, and whether a backward will follow it."""

    def __init__(self) -> None:
        self.active = False
        self._with_gradient = False
        self._call: FrameType | None = None

    def begin(self, call: FrameType | None) -> None:
        """Begin a forward. `call`: of the model; None where that is not known."""
        self.active, self._with_gradient, self._call = True, torch.is_grad_enabled(), call

    def end(self) -> None:
        self.active, self._call = False, None

    def is_left_open(self) -> bool:
        """Whether an interrupt (Ctrl-C) has ended the forward, of which no hook is told: its call is not on the stack
        any more."""
        if not self.active or self._call is None:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._call:
            frame = frame.f_back
        return frame is None

    def expects_backward(self) -> bool:
        return self._with_gradient if self.active else torch.is_grad_enabled()


class RootHooks:
    """Hooks of the whole model: open and close the forward."""

    def __init__(
        self,
        module: nn.Module,
        root: RootState,
        begin: Callable[[Any, Any], None],
        end: Callable[[], None],
        on_gradient: OnGradient,
    ) -> None:
        """`begin` gets the arguments of the call. `on_gradient` gets each gradient that reaches an output, and returns
        the one that goes on."""
        self.are_there = True
        self._root = root
        self._begin = begin
        self._end = end
        self._on_gradient = on_gradient
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        self.are_there = False
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not in_backward() and (not self._root.active or self._root.is_left_open()):
            self._begin(args, kwargs)
            self._root.begin(None if torch.compiler.is_compiling() else sys._getframe(1))

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not in_backward():
            if not self._root.active:
                return None
            self._root.end()
            self._end()
        return hook_outputs(output, self._on_gradient) if torch.is_grad_enabled() else None
