"""What passes a block's boundary: tensors inside objects on the way in, changes of the inputs on the way out.

A block gets its inputs through an identity (`_Boundary` in `ds_slide.runtime.weights.hooks`), as other tensors on the
same memory, and its outputs have to reach the block. Tuples, lists and dictionaries among the arguments are copied. An
object (a dataclass, a namespace, a graph batch) is not: the caller may give the same object to all blocks, and read it
afterwards. So its fields hold the outputs of the identity while the block computes. Afterwards each field gets its old
value back, unless the block has put something else there.

A write in place changes the bytes of both tensors, but only the block's tensor knows the operation that made them. So
the caller's tensor gets the graph of the block's: otherwise a block that returns nothing and works in place would never
train.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ds_slide.runtime.core.calls import is_opaque

DEPTH = 8
"""The depth to which nested objects are searched; a batch of torch_geometric has its tensors at 5."""
MOST_OBJECTS = 256
"""The most objects that are searched for one call. Tensors beyond them are left as they are: that costs speed and
memory, no bits."""

_PLAIN = (str, bytes, int, float, complex, type(None))
_CLOSED = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, torch.device)


class Field(NamedTuple):
    """A place in an object. `held`: a differentiable tensor, or a tuple with some."""

    write: Callable[[Any, Any, Any], None]
    read: Callable[[Any, Any], Any]
    owner: Any
    key: Any
    held: Any


def differentiable(leaf: Any) -> bool:
    """Whether `leaf` is a tensor that can have a gradient."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex())


def add_differentiable(found: list[torch.Tensor], nodes: Iterable[Any]) -> None:
    """Append the differentiable tensors among `nodes`, and those in plain containers there, to `found`. The order is
    that of torch's pytree. Other objects are not taken apart."""
    # Each forward of a block needs it. So the common arguments (tensors, None, flags, objects) cost no call.
    for node in nodes:
        kind = type(node)
        if kind is torch.Tensor:
            if node.requires_grad and differentiable(node):
                found.append(node)
        elif kind is tuple or kind is list:
            add_differentiable(found, node)
        elif kind is dict:
            add_differentiable(found, node.values())
        elif isinstance(node, torch.Tensor):
            if differentiable(node):
                found.append(node)
        elif isinstance(node, tuple | list | dict):
            found += filter(differentiable, pytree.tree_leaves(node, is_leaf=is_opaque))


def fields_in(*trees: Any) -> list[Field]:
    """Return the fields of objects in `trees` that hold differentiable tensors."""
    found: list[Field] = []
    seen: set[int] = set()
    level = list(trees)
    for _ in range(DEPTH):
        level = [inner for node in level for inner in _look(node, found, seen)]
        if not level:
            break
    return found


def tensors_of(fields: Sequence[Field]) -> list[torch.Tensor]:
    """Return each tensor once, in the order of the fields."""
    leaves = (leaf for field in fields for leaf in _leaves(field.held) if differentiable(leaf))
    return list({id(leaf): leaf for leaf in leaves}.values())


def put(fields: Sequence[Field], instead: Mapping[int, torch.Tensor]) -> list[Any]:
    """Put other tensors into the fields. `instead`: the new tensors, by `id` of the replaced tensor. Returns the new
    values of the fields."""
    held = [_replaced(field.held, instead) for field in fields]
    for field, value in zip(fields, held, strict=True):
        field.write(field.owner, field.key, value)
    return held


def restore(fields: Sequence[Field], held: Sequence[Any]) -> None:
    """Give the fields their values from before `put`, where they still hold the values that `put` has set."""
    for field, value in zip(fields, held, strict=True):
        if field.read(field.owner, field.key) is value:
            field.write(field.owner, field.key, field.held)


def _look(node: Any, found: list[Field], seen: set[int]) -> Iterator[Any]:
    """Add the fields of `node` to `found`, and yield what else it holds."""
    if isinstance(node, _PLAIN) or isinstance(node, _CLOSED) or id(node) in seen or len(seen) >= MOST_OBJECTS:
        return
    seen.add(id(node))
    if isinstance(node, tuple):  # a tuple cannot change: its owner gets another one
        yield from node
        return
    for write, read, owner, key, value in _places(node):
        leaves = _leaves(value)
        if any(differentiable(leaf) for leaf in leaves):
            found.append(Field(write, read, owner, key, value))
        yield from (leaf for leaf in leaves if not isinstance(leaf, torch.Tensor))


def _places(node: Any) -> Iterator[tuple[Any, Any, Any, Any, Any]]:
    if isinstance(node, list):
        for index, value in enumerate(list.__iter__(node)):
            yield list.__setitem__, _item, node, index, value
    if isinstance(node, dict):
        for key, value in list(dict.items(node)):
            yield dict.__setitem__, _item, node, key, value
    if isinstance(own := getattr(node, "__dict__", None), dict):
        for key, value in list(own.items()):
            yield dict.__setitem__, _item, own, key, value
    for name in _slots(type(node)):
        if (value := getattr(node, name, None)) is not None:
            yield object.__setattr__, getattr, node, name, value


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(base.__dict__.get(name), types.MemberDescriptorType):
                yield name


def _item(owner: Any, key: Any) -> Any:
    if isinstance(owner, dict):
        return dict.get(owner, key)
    return list.__getitem__(owner, key) if key < len(owner) else None


def _leaves(value: Any) -> list[Any]:
    """Return the leaves of a value; tuples are taken apart."""
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, tuple) else [value]


def _replaced(value: Any, instead: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, tuple):
        parts = [_replaced(each, instead) for each in value]
        if hasattr(value, "_make"):
            return value._make(parts)
        return tuple(parts) if type(value) is tuple else value
    return instead.get(id(value), value)


class _Written(torch.autograd.Function):
    """Gives a tensor the graph of another tensor on the same memory that has been written to."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, _alias: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        ctx.is_view = tensor._is_view()
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        # The graph of the other tensor leads to the tensor's own past. Autograd needs zeros for a view, and accepts
        # None for any other tensor.
        zero = gradient.new_zeros(()).expand_as(gradient) if ctx.is_view else None
        return zero, gradient


class Passed:
    """The tensors that have gone through a block's boundary, until the block has ended."""

    __slots__ = ("_fields", "_held", "_node", "_through", "inputs")

    def __init__(
        self, inputs: Sequence[torch.Tensor], through: Sequence[torch.Tensor], fields: Sequence[Field]
    ) -> None:
        """Keep them. `fields`: the fields of objects that hold `through` from now on."""
        self.inputs = inputs
        self._through = through
        self._node = through[0].grad_fn
        self._fields = fields
        if fields:
            self._held = put(fields, dict(zip(map(id, inputs), through, strict=True)))

    def hand_back(self) -> None:
        """Show the caller what the block has written, and give the objects their own tensors back. Called when the
        block has ended."""
        for index, alias in enumerate(self._through):
            if alias.grad_fn is not self._node:
                tensor = self.inputs[index]
                # Tensors that the block has saved since its write are unchanged.
                with torch.autograd._unsafe_preserve_version_counter(tensor):
                    _Written.apply(tensor, alias)
        if self._fields:
            restore(self._fields, self._held)
