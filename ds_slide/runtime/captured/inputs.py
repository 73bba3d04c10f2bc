"""The inputs of a recorded block: which calls are like the recorded one, and the places that recordings read."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Types of arguments that are no tensors, of blocks that may be recorded. They are compared by value."""
_CONTAINERS = (tuple, list, dict)


class NotRecordable(Exception):
    """The reason why a call cannot be recorded. The call runs as it is written."""


def leaves_of(node: Any) -> Iterator[Any]:
    """Yield what containers hold, in their order."""
    kind = type(node)
    if kind is dict:
        for each in node.values():
            yield from leaves_of(each)
    elif kind is tuple or kind is list:
        for each in node:
            yield from leaves_of(each)
    else:
        yield node


def with_leaves(node: Any, leaves: Iterator[Any]) -> Any:
    """Return `node` with other leaves."""
    kind = type(node)
    if kind is dict:
        return {key: with_leaves(each, leaves) for key, each in node.items()}
    if kind is tuple or kind is list:
        return kind([with_leaves(each, leaves) for each in node])
    return next(leaves)


def _outline(node: Any) -> Any:
    """Return the containers of `node`, without their leaves."""
    kind = type(node)
    if kind is dict:
        return {key: _outline(each) for key, each in node.items()}
    return (kind, [_outline(each) for each in node]) if kind in _CONTAINERS else None


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return leaf


class Signature:
    """What a call has in common with the recorded one: containers, values, and the layouts of tensors."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> None:
        """Raises NotRecordable."""
        given = (tuple(args), dict(kwargs))
        leaves = list(leaves_of(given))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if leaf.device.type != device.type or type(leaf) is not torch.Tensor or leaf.is_inference():
                    raise NotRecordable(f"an input is a {type(leaf).__name__} on {leaf.device}")
            elif not isinstance(leaf, PLAIN):
                raise NotRecordable(f"an input is a {type(leaf).__name__}")
        if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise NotRecordable("no input needs a gradient")
        self._outline = _outline(given)
        self._leaves = [_described(leaf) for leaf in leaves]

    def fits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Return the leaves of a call that is like the recorded one; None for another call."""
        given = (tuple(args), dict(kwargs))
        leaves = list(leaves_of(given))
        if [_described(leaf) for leaf in leaves] != self._leaves or _outline(given) != self._outline:
            return None
        return None if any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in leaves) else leaves


class Place:
    """A tensor that recordings read. It is filled before each replay."""

    def __init__(self, like: torch.Tensor) -> None:
        self.tensor = torch.empty_like(like.detach())  # with its strides, unless elements share their memory
        self._source: weakref.ref[torch.Tensor] | None = None
        self._version = 0

    def fill(self, source: torch.Tensor) -> None:
        """Copy `source`, unless the place has its contents already."""
        if self._source is not None and self._source() is source and self._version == source._version:
            return
        self.tensor.copy_(source)
        self._source, self._version = weakref.ref(source), source._version


class SharedPlaces:
    """Places of inputs without a gradient, which most blocks get alike: position embeddings, masks."""

    def __init__(self) -> None:
        self._places: dict[Any, Place] = {}

    def of(self, index: int, tensor: torch.Tensor) -> Place:
        """Return the place of the leaf `index` of a call."""
        key = index, tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._places:
            self._places[key] = Place(tensor)
        return self._places[key]

    def clear(self) -> None:
        self._places.clear()
