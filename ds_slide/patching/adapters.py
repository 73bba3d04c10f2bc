"""PEFT's adapters on parameters that a parametrization makes: `target_parameters` on packed experts, and merging.

PEFT adds an adapter to such a parameter as one more parametrization, for the length of a forward. With PEFT 0.21 that
fails. The addition is not taken away again, so the next forward raises an error, or adds it twice. And with adapters on
two parameters of one module, the second adapter is left out: the first one's forward keeps what parametrizations
have made, and the second reads its parameter there before it adds to it.

Here the addition is made when the module reads the parameter, and taken away after the forward. The numbers are those
of PEFT on the widened parameter.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ds_slide.errors import SlideError
from ds_slide.model.experts import adapters_of_parameters
from ds_slide.model.subclasses import Rebuilt
from ds_slide.patching.kinds import Forward, ForwardPatch, replace_forward


class _Addition(nn.Module):
    """A parametrization: a parameter [experts, ...] -> the same with the active adapters of PEFT's wrapper."""

    def __init__(self, wrapper: Any, active: list[str]) -> None:
        super().__init__()
        self._of = (wrapper, active)  # in a tuple, because the wrapper is no module inside of this one

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        wrapper, active = self._of
        here = copy.copy(wrapper)
        here.get_param = lambda: weight  # PEFT asks for its data type and device
        if len(active) == 1 and wrapper.num_experts > 1 and hasattr(wrapper, "get_delta_factors"):
            left, right, scaling = here.get_delta_factors(active[0])
            with torch.autocast(weight.device.type, enabled=False):  # as in PEFT
                return torch.baddbmm(weight, left, right, alpha=scaling)
        return weight + functools.reduce(operator.add, [here.get_delta_weight(name) for name in active])


def adapt_parametrized(root: nn.Module) -> Iterator[ForwardPatch]:
    """Make PEFT's wrappers in `root` of parameters with a parametrization add their adapters, and yield what undoes
    that. They merge no more, after the engine either: PEFT would merge into a tensor that is gone afterwards."""
    for base, wrappers in adapters_of_parameters(root).items():
        for wrapper in wrappers:
            if parametrize.is_parametrized(base, wrapper.parameter_name):
                vars(wrapper)["merge"] = functools.partial(_refuse_merge, wrapper.parameter_name, "a base in bf16")
                yield replace_forward(wrapper, "experts", _adding)


def refuse_merging(root: nn.Module) -> None:
    """Let PEFT's adapters in `root` on weights that were taken apart merge no more. PEFT would put another weight in
    the place, and the rest of the base would keep the names of its parts."""
    for path, layer in root.named_modules():
        base: Any = getattr(layer, "base_layer", None)
        if hasattr(layer, "merge") and parametrize.is_parametrized(base) and _has_parts(base.parametrizations):
            vars(layer)["merge"] = functools.partial(_refuse_merge, path, "a fresh base")


def _has_parts(parametrizations: nn.Module) -> bool:
    return any(isinstance(each, Rebuilt) for each in parametrizations.modules())


def _refuse_merge(name: str, base: str, *_args: Any, **_options: Any) -> None:
    raise SlideError(
        f"the adapter on {name} cannot be merged, because the packed weight is made anew at each read; save the "
        f"adapters, load them on {base}, and merge there"
    )


def _adding(original: Forward) -> Forward:
    @torch.compiler.disable
    def forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or kwargs.get("adapter_names") or not active:
            return original(self, hidden, *args, **kwargs)
        chain = vars(self.get_base_layer().parametrizations[self.parameter_name])
        modules = chain["_modules"]
        # Another dictionary for this call: one that is changed looks like state that the block keeps, and a block with
        # state of its own is not recomputed unasked.
        chain["_modules"] = {**modules, str(len(modules)): _Addition(self, active)}
        try:
            with parametrize.cached():
                return self.base_layer(hidden, *args, **kwargs)
        finally:
            chain["_modules"] = modules

    return forward
