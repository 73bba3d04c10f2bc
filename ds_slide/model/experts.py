"""Frozen experts that can move in parts: transformers' fused experts, in 3-D parameters [experts, ..., ...].

Such a module has one forward for all of them, and computes with the experts that a token was routed to. An expert is a
slice of contiguous bytes. So a block of several GB needs the GPU memory of a few experts at a time
(`ds_slide.runtime.weights.experts`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_slide.model.carried import TRAINED_DTYPES
from ds_slide.model.layer_lists import parameter_shape

_MARKS = ("num_experts", "is_transposed", "has_gate", "has_bias")
"""Attributes of the modules that `transformers.integrations.moe.use_experts_implementation` makes."""


@dataclass(frozen=True, eq=False)
class Experts:
    """The experts of one module. `names`: its attributes that are 3-D parameters, in the order of the module."""

    path: str
    module: nn.Module
    names: tuple[str, ...]
    adapters: tuple[nn.Module, ...] = ()
    """PEFT's wrappers of `target_parameters` around the module, each for one of `names`, the outermost first."""

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of these parameters in `named_parameters()` of the model."""
        return tuple(f"{self.path}.{name}" if self.path else name for name in self.names)


def find_experts(root: nn.Module, trained: Collection[nn.Parameter] | None) -> tuple[list[Experts], dict[str, str]]:
    """Return the experts in `root` that can move in parts, and for each other experts module, by its path, why it
    cannot, as a clause. `trained`: the parameters that an optimizer updates; None for an engine without an
    optimizer."""
    found: list[Experts] = []
    reasons: dict[str, str] = {}
    adapters = adapters_of_parameters(root)
    for path, module in root.named_modules():
        if not all(hasattr(module, mark) for mark in _MARKS):
            continue
        names = tuple(_three_dimensional(module))
        around = tuple(adapters[module])
        reason = _why_whole(module, names, trained, around)
        if reason is None:
            found.append(Experts(path, module, names, around))
        else:
            reasons[path] = reason
    return found, reasons


def adapters_of_parameters(root: nn.Module) -> dict[nn.Module, list[Any]]:
    """Return PEFT's wrappers of `target_parameters` by the module whose parameters they adapt. The outermost comes
    first, and each wraps the next one."""
    found = defaultdict(list)
    for wrapper in root.modules():
        base: Any = wrapper
        while hasattr(base, "parameter_name") and hasattr(base, "base_layer"):
            base = base.base_layer
        if base is not wrapper:
            found[base].append(wrapper)
    return found


def _three_dimensional(module: nn.Module) -> Iterator[str]:
    for name, parameter in module._parameters.items():
        if parameter is not None and len(shape := parameter_shape(parameter)) == 3 and shape[0] == module.num_experts:
            yield name


def _why_whole(
    module: nn.Module, names: tuple[str, ...], trained: Collection[nn.Parameter] | None, adapters: Sequence[Any]
) -> str | None:
    """Return why the experts of a module cannot move in parts; None where they can."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if "parametrizations" in module._modules or not names:
        return "it has no 3-D parameters of its own, but parametrizations or another form"
    if not all(hasattr(each, "get_delta_factors") for each in adapters):
        return "its adapters (target_parameters) are added to the whole 3-D parameter by PEFT before 0.21"
    if any(each.parameter_name not in names for each in adapters) or (adapters and module.num_experts == 1):
        return "its adapters (target_parameters) are on other parameters than those of several experts"
    if len(own) != sum(1 for _ in module.parameters()):
        return "a module inside of it has parameters, too"
    if trained is not None and any(each in trained or each.requires_grad for each in own.values()):
        return "it has parameters that are trained"
    if len(dtypes := {own[name].dtype for name in names}) > 1 or not dtypes <= set(TRAINED_DTYPES):
        return "its experts are not all in bfloat16, or in float16, or in float32"
    if getattr(module, "_is_expert_parallel", False):  # older releases of transformers 5 do not have it
        return "its experts are divided over the ranks"
    return None
