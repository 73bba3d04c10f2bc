"""Gives each output of the whole model a node of its own, so that no output's hook sees the gradient of another.

DeepSpeed divides the gradient of each output by the number of micro-batches when a script calls `loss.backward()`. A
model that returns (loss, logits) has computed the loss from the logits. A hook on the logits themselves would divide
the gradient from the loss a second time; a hook on an alias sees only the gradient of what the script computes from the
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Protocol

import torch
from torch import nn

from ds_slide.patching.pending import PendingLogits, identity


class OutputEvents(Protocol):
    """The receiver of gradients that reach an output."""

    def on_output_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient to propagate further."""


def hook_outputs(output: Any, events: OutputEvents) -> Any:
    """Return `output` with a hook on each differentiable tensor in it, which reports its gradient to `events`.

    Lists, dictionaries and objects stay the same object, and their tensors are replaced by the aliases. Tuples, which
    cannot change, are made anew.
    """
    if isinstance(output, torch.Tensor):
        return _hooked(output, events)
    if isinstance(output, tuple):
        items = [hook_outputs(item, events) for item in output]
        unchanged = all(new is old for new, old in zip(items, output, strict=True))
        return output if unchanged else _tuple_like(output, items)
    for place, item in _places(output):
        new = hook_outputs(item, events)
        if new is not item:
            _put(output, place, new)
    return output


def _hooked(tensor: torch.Tensor, events: OutputEvents) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    if isinstance(tensor, PendingLogits) and tensor.made is None:
        alias: torch.Tensor = tensor  # it makes its alias itself, when it is computed
    elif tensor.is_leaf:
        return tensor
    else:
        alias = identity(tensor)
    alias.register_hook(events.on_output_gradient)
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
        # An object of an unknown class (a key-value cache) gives only the tensors that are its own attributes.
        yield from ((name, item) for name, item in list(vars(node).items()) if isinstance(item, torch.Tensor))


def _put(node: Any, place: Any, item: Any) -> None:
    if isinstance(node, MutableMapping | list):
        node[place] = item
    else:
        object.__setattr__(node, place, item)  # also into a frozen dataclass
