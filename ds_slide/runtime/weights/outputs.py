"""The outputs of the whole model: each one gets a node of its own, so that no output lies behind another's.

DeepSpeed divides the gradient of each output by the number of micro-batches when a script calls `loss.backward()`. A
model that returns (loss, logits) has computed the loss from the logits. A hook on the logits themselves would divide
what comes from the loss a second time; a hook on an alias of them sees only what the script computes from the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from ds_slide.patching.pending import PendingLogits, identity

OnGradient = Callable[[torch.Tensor], torch.Tensor]
"""Gets the gradient of an output and returns the one that goes on."""


def hook_outputs(output: Any, on_gradient: OnGradient) -> Any:
    """Return `output` with `on_gradient` on each differentiable tensor in it.

    Lists, dictionaries and objects stay the same object and get the aliases in the place of their tensors. Tuples,
    which cannot change, are made anew.
    """
    if isinstance(output, torch.Tensor):
        return _hooked(output, on_gradient)
    if isinstance(output, tuple):
        items = [hook_outputs(item, on_gradient) for item in output]
        unchanged = all(new is old for new, old in zip(items, output, strict=True))
        return output if unchanged else _tuple_like(output, items)
    for place, item in _places(output):
        new = hook_outputs(item, on_gradient)
        if new is not item:
            _put(output, place, new)
    return output


def _hooked(tensor: torch.Tensor, on_gradient: OnGradient) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    if isinstance(tensor, PendingLogits) and tensor.made is None:
        alias: torch.Tensor = tensor  # makes its alias itself, when it is computed
    elif tensor.is_leaf:
        return tensor
    else:
        alias = identity(tensor)
    alias.register_hook(on_gradient)
    return alias


def _tuple_like(output: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    make: Callable[[list[Any]], tuple[Any, ...]] = getattr(type(output), "_make", type(output))
    return make(items)


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys, indices or attribute names of a container, with what is there."""
    if isinstance(node, MutableMapping):
        yield from list(node.items())
    elif isinstance(node, list):
        yield from enumerate(node)
    elif hasattr(node, "__dataclass_fields__") and not isinstance(node, type):
        yield from ((name, getattr(node, name)) for name in node.__dataclass_fields__ if hasattr(node, name))
    elif hasattr(node, "__dict__") and not isinstance(node, type | nn.Module):
        # Of an object of a class that is not known (a key-value cache) only the tensors that it has itself.
        yield from ((name, item) for name, item in list(vars(node).items()) if isinstance(item, torch.Tensor))


def _put(node: Any, place: Any, item: Any) -> None:
    if isinstance(node, MutableMapping | list):
        node[place] = item
    else:
        object.__setattr__(node, place, item)  # also into a frozen dataclass
