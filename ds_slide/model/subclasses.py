"""Frozen parameters that are tensor subclasses made of plain tensors, as torchao's quantised weights are.

Such a parameter has no memory of its own, and ZeRO-3 cannot partition it. So its largest plain tensor (packed weights)
becomes the parameter, and the others (scales, zero points) buffers beside it. A parametrization makes the subclass of
them whenever the module reads the weight. They move with their block (`ds_slide.model.carried`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

_WHOLE = "packed"


@dataclass(frozen=True)
class Recipe:
    """How a tensor subclass is made of its tensors."""

    kind: Any
    names: tuple[str, ...]
    """Its attributes that are tensors."""
    context: Any
    """What else it consists of."""
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Recipe | None:
        """Return the recipe of a tensor; None for a tensor with memory of its own."""
        if not is_made_of_tensors(tensor):
            return None
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return cls(type(tensor), tuple(names), context, tensor.size(), tensor.stride())

    def made(self, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Return the subclass of `tensors`, by name."""
        made: torch.Tensor = self.kind.__tensor_unflatten__(dict(tensors), self.context, self.size, self.stride)
        return made


def is_made_of_tensors(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a subclass that torch can take apart."""
    return hasattr(type(tensor), "__tensor_flatten__")


def can_be_taken_apart(parameter: nn.Parameter) -> bool:
    """Whether a subclass is frozen, and whole on this rank (a DTensor has a mesh of ranks)."""
    return not parameter.requires_grad and not hasattr(parameter, "device_mesh")


class Rebuilt(nn.Module):
    """The parametrization: the largest plain tensor -> the subclass. The other tensors are its buffers."""

    def __init__(self, recipes: Mapping[str, Recipe], largest: str, beside: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._recipes, self._largest = dict(recipes), largest
        for name, tensor in beside.items():
            self.register_buffer(name, tensor)

    def forward(self, largest: torch.Tensor) -> torch.Tensor:
        return self._made(_WHOLE, {**self._buffers, self._largest: largest})

    def _made(self, name: str, plain: Mapping[str, Any]) -> Any:
        recipe = self._recipes.get(name)
        if recipe is None:
            return plain[name]
        return recipe.made({each: self._made(f"{name}_{each}", plain) for each in recipe.names})


def _plain(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors in `tensor`, with a name for each."""
    if (recipe := Recipe.of(tensor)) is None:
        yield name, tensor
        return
    for each in recipe.names:
        yield from _plain(getattr(tensor, each), f"{name}_{each}")


def _recipes(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, Recipe]]:
    """Yield the recipe of `tensor` and of each subclass in it, with the same names."""
    if (recipe := Recipe.of(tensor)) is not None:
        yield name, recipe
        for each in recipe.names:
            yield from _recipes(getattr(tensor, each), f"{name}_{each}")


def take_apart(root: nn.Module) -> None:
    """Take all frozen parameters in `root` apart that are such subclasses. Modules that share one still share it."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter, Rebuilt]] = {}  # with the old one, whose id is the key
    for module in list(root.modules()):
        for name, old in list(module._parameters.items()):
            if old is None or not is_made_of_tensors(old) or not can_be_taken_apart(old):
                continue
            if id(old) not in made:
                made[id(old)] = (old, *_apart(old))
            _, module._parameters[name], rebuilt = made[id(old)]
            register_parametrization(module, name, rebuilt, unsafe=True)


def _apart(tensor: torch.Tensor) -> tuple[nn.Parameter, Rebuilt]:
    plain = {name: each.detach() for name, each in _plain(tensor, _WHOLE)}
    largest = max(plain, key=lambda name: plain[name].nbytes)
    parameter = nn.Parameter(plain.pop(largest), requires_grad=False)
    return parameter, Rebuilt(dict(_recipes(tensor, _WHOLE)), largest, plain)
