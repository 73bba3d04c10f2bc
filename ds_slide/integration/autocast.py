"""DeepSpeed's `torch_autocast`: a model in fp32 whose matrix products run in bf16.

Stock ZeRO-3 gathers the weights of modules that are safe in lower precision (linear and convolutional ones, or those
that the JSON names) in bf16, widens them again, and autocast narrows them at each use. Here the weights themselves are
kept in bf16, beside the low halves of their exact masters: what crosses to the GPU is what autocast computes with, so
that it has nothing to cast. A weight that another module has as well (a tied embedding, which computes in fp32) stays
as it is, and so do frozen ones, which have no master that would keep their low halves.

Gradients leave as in stock: in bf16 those of weights that are gathered in it, the rest as the parameters are.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.torch_autocast import (
    get_comm_dtype,
    get_default_autocast_lower_precision_modules,
    has_comm_dtype,
)
from torch import nn

from ds_slide.model.precision import Precision
from ds_slide.model.structure import PrecisionOf


def is_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether `torch_autocast` is on. `ds_config`: raw."""
    return bool((ds_config.get("torch_autocast") or {}).get("enabled", False))


def precision_under_autocast(
    module: nn.Module, ds_config: Mapping[str, Any], trainable: Collection[nn.Parameter]
) -> PrecisionOf:
    """The precision of the parameters of `module`, which DeepSpeed has marked with the data type of their collectives.
    `trainable`: those that an optimizer updates."""
    names = ds_config["torch_autocast"].get("lower_precision_safe_modules")
    safe = {_class_of(name) for name in names or get_default_autocast_lower_precision_modules()}
    owners: dict[nn.Parameter, set[type[nn.Module]]] = defaultdict(set)
    for child in module.modules():
        for parameter in _own_parameters(child):
            owners[parameter].add(type(child))

    def precision_of(parameter: nn.Parameter) -> Precision:
        dtype = parameter.dtype
        if parameter not in trainable or not has_comm_dtype(parameter):
            return Precision(dtype, dtype, dtype)
        reduced: torch.dtype = get_comm_dtype(parameter)
        narrows = dtype == torch.float32 and reduced == torch.bfloat16 and owners[parameter] <= safe
        return Precision(dtype, reduced if narrows else dtype, reduced)

    return precision_of


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    # By `values`, which looks only; ZeRO-3's dictionary gathers what is looked up in it.
    return (parameter for parameter in module._parameters.values() if parameter is not None)


def _class_of(name: str) -> type[nn.Module]:
    """DeepSpeed has found it before, and compares exact types."""
    package, _, attribute = name.rpartition(".")
    found: type[nn.Module] = getattr(importlib.import_module(package), attribute)
    return found
