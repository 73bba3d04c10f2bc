"""The inputs of a recorded block: which calls are like the recorded one, and the places that recordings read."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ds_slide.runtime.captured.graphs import Token
from ds_slide.runtime.core.calls import mapped

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
    return mapped(lambda _: next(leaves), node)


def _outline(node: Any) -> Any:
    """Return the containers of `node`, without their leaves."""
    kind = type(node)
    if kind is dict:  # the order of its keys is the order of the leaves
        return kind, [(key, _outline(each)) for key, each in node.items()]
    return (kind, [_outline(each) for each in node]) if kind in _CONTAINERS else None


def _described(leaf: Any) -> Any:
    """Return what two leaves have in common that are alike. Raises NotRecordable."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf  # `True` is no 1
    if type(leaf) is not torch.Tensor or leaf.is_nested or leaf.layout is not torch.strided or leaf.is_inference():
        raise NotRecordable(f"an input is a {type(leaf).__name__} with the layout {leaf.layout}")
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad


class Signature:
    """What a call has in common with the recorded one: containers, values, and the layouts of tensors."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> None:
        """Raises NotRecordable."""
        given = (tuple(args), dict(kwargs))
        leaves = list(leaves_of(given))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if leaf.device.type != device.type:
                    raise NotRecordable(f"an input is on {leaf.device}")
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
        try:
            is_alike = [_described(leaf) for leaf in leaves] == self._leaves and _outline(given) == self._outline
        except NotRecordable:
            return None
        return leaves if is_alike else None


class Place:
    """A tensor that recordings read. It is filled before each replay. Backwards read it, too: it keeps its contents
    while a forward that has read them waits for its backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        # The same memory with versions of its own. A recorded graph saves `tensor`, and may have its backward after
        # later calls; torch refuses a backward through a tensor with a new version.
        self._memory = tensor.data
        self._source: weakref.ref[torch.Tensor] | None = None
        self._versions = 0, 0
        self._readers: weakref.WeakSet[Token] = weakref.WeakSet()

    def may_take(self, source: torch.Tensor) -> bool:
        """Whether it has the contents of `source`, or may be filled with them."""
        return self._has(source) or not self._readers

    def fill(self, source: torch.Tensor, reader: Token | None) -> None:
        """Copy `source`, unless the place has its contents already. `reader`: of a forward whose backward reads it."""
        if not self._has(source):
            self._memory.copy_(source)
            self._source, self._versions = weakref.ref(source), (source._version, self.tensor._version)
        if reader is not None:
            self._readers.add(reader)

    def forget(self) -> None:
        """Forget whose contents it has: code that writes through `.data` changes no version."""
        self._source = None

    def _has(self, source: torch.Tensor) -> bool:
        # An input that needs a gradient shares its memory with calls of other shapes.
        is_same = self._source is not None and self._source() is source and not source.requires_grad
        return is_same and self._versions == (source._version, self.tensor._version)


class SharedPlaces:
    """Places that the blocks of one shape share: of the gradients of results, and of inputs without a gradient, which
    most blocks get alike (position embeddings, masks). Models with two kinds of layers have two masks of one shape, and
    so two places."""

    def __init__(self) -> None:
        self._places: dict[Any, list[Place]] = {}
        self._gradients: dict[Any, torch.Tensor] = {}

    def of(self, index: int, tensor: torch.Tensor) -> Place:
        """Return a place that may take the leaf `index` of a call."""
        places = self._places.setdefault((index, tensor.shape, tensor.stride(), tensor.dtype, tensor.device), [])
        found = next((each for each in places if each.may_take(tensor)), None)
        if found is None:
            # with its strides, unless elements share their memory
            places.append(found := Place(torch.empty_like(tensor.detach())))
        return found

    def of_gradients(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the places where backwards read the gradients of `results`. Blocks with results alike share them."""
        found = []
        for number, each in enumerate(results):
            key = number, each.shape, each.dtype
            if key not in self._gradients:
                self._gradients[key] = torch.empty(each.shape, dtype=each.dtype, device=each.device)
            found.append(self._gradients[key])
        return found

    def forget(self) -> None:
        """Fill all places anew in the forward that begins."""
        for places in self._places.values():
            for each in places:
                each.forget()
