"""Questions about the call under way: what a forward is for, which tensors it got, and under which transform it runs.

A forward of a block may be a new forward, or the recomputation of an earlier one. Both happen while an autograd graph
runs. Activation checkpointing recomputes a block from the backward of an autograd.Function (its re-entrant form) or
from an unpack hook of saved tensors (its other form). A hook of a tensor or of a module, or a callback at the end of
backward, may begin a new forward: gradient caching embeds its mini-batches again in such a hook. Only the Python stack
tells these apart: autograd enters Python once for each of them.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd.function import BackwardCFunction, Function
from torch.utils import _pytree as pytree

from ds_slide.errors import SlideError

NO_TASK = -1

# torch 2.13 calls `apply_boxed`; releases until 2.11 have `apply` alone.
_BACKWARDS = tuple(
    getattr(BackwardCFunction, name).__code__ for name in ("apply", "apply_boxed") if hasattr(BackwardCFunction, name)
)
_APPLY = Function.apply.__func__.__code__  # type: ignore[attr-defined]
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
UNPACK = "unpack"
"""A part of the name of every unpack hook that recomputes: torch's, DeepSpeed's and the block's own."""


class Call(enum.Enum):
    """What a forward of a block is for."""

    FORWARD = enum.auto()
    """A new forward, which makes a new graph or none."""
    REENTRANT = enum.auto()
    """A Function's backward recomputes the block, and will run the new graph itself."""
    SAVED_TENSORS = enum.auto()
    """An unpack hook recomputes the block for its saved tensors, and drops the new graph."""


def graph_task() -> int:
    """The autograd graph that the calling thread is running, NO_TASK when there is none."""
    task: int = torch._C._current_graph_task_id()
    return task


def in_backward() -> bool:
    """Whether the calling thread is running an autograd graph."""
    running: bool = torch._C._current_graph_task_id() != NO_TASK
    return running


def call_under_way() -> Call:
    """Return what the caller's forward is for. Outside of backward this looks at no frame."""
    if not in_backward():
        return Call.FORWARD
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code in _BACKWARDS:
            return Call.REENTRANT
        if UNPACK in code.co_name:
            return Call.SAVED_TENSORS
        if code is _ENGINE:
            break
        frame = frame.f_back
    return Call.FORWARD


def recomputing_nodes() -> Iterator[Any]:
    """Yield the nodes of Functions whose backward is on the stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _BACKWARDS:
            yield frame.f_locals["self"]
        frame = frame.f_back


def function_around(end: FrameType | None) -> Any:
    """Return the context of the outermost Function whose forward is on the stack; None where there is none.

    A Function turns gradients off for its forward. A Function that recomputes (re-entrant checkpointing, a reversible
    layer) runs it again in backward; a `torch.no_grad()` of the script does not. `end`: the frame where the search
    ends.
    """
    found = None
    inner: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not end:
        if frame.f_code is _APPLY and inner is not None and inner.f_code.co_argcount:
            context = inner.f_locals.get(inner.f_code.co_varnames[0])
            found = context if isinstance(context, BackwardCFunction) else found
        inner, frame = frame, frame.f_back
    return found


def is_in_vmap() -> bool:
    """Whether `torch.func.vmap` is the innermost transform of torch.func under way."""
    functorch = torch._C._functorch
    if functorch.maybe_current_level() is None:
        return False
    return bool(functorch.peek_interpreter_stack().key() == functorch.TransformType.Vmap)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside the wrappers of torch.func."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


class RootState:
    """Whether a forward of the whole model is under way, and whether a backward will follow it."""

    def __init__(self) -> None:
        self.active = False
        self._with_gradient = False
        self.call: FrameType | None = None

    def begin(self, call: FrameType | None) -> None:
        """Begin a forward. `call`: the frame of the model's call; None where it is not known."""
        self.active, self._with_gradient, self.call = True, torch.is_grad_enabled(), call

    def end(self) -> None:
        self.active, self.call = False, None

    def is_left_open(self) -> bool:
        """Whether an interrupt (Ctrl-C) has ended the forward. No hook is called then, but its frame has left the
        stack."""
        if not self.active or self.call is None:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.call:
            frame = frame.f_back
        return frame is None

    def expects_backward(self) -> bool:
        return self._with_gradient if self.active else torch.is_grad_enabled()


def is_opaque(node: Any) -> bool:
    """Whether a node is not a plain container. A key-value cache, which transformers may register as a tree, would come
    back as another object, and what the block writes into it would be lost."""
    return not isinstance(node, tuple | list | dict)


def mapped(function: Callable[[Any], Any], node: Any) -> Any:
    """Return `node` with each leaf replaced by `function` of it."""
    # This does the work of torch's tree_map in half the time for the usual containers: each block's forward calls it
    # twice.
    kind = type(node)
    if kind is tuple:
        return tuple([mapped(function, each) for each in node])
    if kind is list:
        return [mapped(function, each) for each in node]
    if kind is dict:
        return {key: mapped(function, each) for key, each in node.items()}
    return function(node) if is_opaque(node) else pytree.tree_map(function, node, is_leaf=is_opaque)


def add_tensors(found: list[torch.Tensor], node: Any) -> None:
    """Append the tensors in `node` to `found`, in the order of torch's pytree."""
    # The usual containers are handled here, in few calls of Python.
    kind = type(node)
    if kind is tuple or kind is list:
        for each in node:
            add_tensors(found, each)
    elif kind is dict:
        for each in node.values():
            add_tensors(found, each)
    elif isinstance(node, torch.Tensor):
        found.append(node)
    elif node is not None and kind is not bool:
        found += (leaf for leaf in pytree.tree_leaves(node) if isinstance(leaf, torch.Tensor))


_REFUSED = (TransformType.Grad, TransformType.Jvp)
"""Transforms of torch.func that cannot work with streamed weights. `grad`, `vjp`, `jacrev` and `hessian` allow no hooks
for saved tensors. Without hooks backward would find other weights than the forward had. Under these and `jvp`, binding
a parameter to its weights has ended the process (torch 2.13: a segmentation fault). `vmap` alone is allowed, and so is
forward mode by `torch.autograd.forward_ad`."""


def require_no_transform() -> None:
    """Raise SlideError inside of a transform that cannot work with streamed weights."""
    if not torch._C._are_functorch_transforms_active():
        return
    if any(interpreter.key() in _REFUSED for interpreter in get_interpreter_stack() or ()):
        raise SlideError(
            "torch.func.grad, vjp, jvp and what is made of them (jacrev, hessian, vmap of grad) cannot go through a "
            "model that DS-Slide streams, because its weights come and go; use torch.autograd.grad, with "
            "create_graph=True for second derivatives, or torch.autograd.forward_ad"
        )
