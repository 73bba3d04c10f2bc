"""PEFT's adapters of low rank on linear layers: base(x) + scaling * B(A(dropout(x))), for bases of any data type.

The replacement calls base, dropout and A as modules, and reads the weight of B. It calls A before the base, so that a
recomputation which ends with the last saved tensor leaves the base's product out (`kernels/lora/low_rank.py`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ds_slide.patching.kinds import (
    Forward,
    ForwardPatch,
    autocast_dtype,
    gains_on,
    own_forward,
    plain_attributes,
    random_linear,
    replace_forward,
)

ADAPTER = ("base_layer", "lora_A", "lora_B", "lora_dropout")
INSIDE, OUTSIDE, RANK = 12, 20, 3
"""Sizes of the probe's own small layers."""


def patch_lora(module: nn.Module, forms: dict[Any, str | None]) -> ForwardPatch | str | None:
    """Patch a linear layer with adapters. `forms`: why classes with the same settings cannot be replaced; None: they
    can."""
    if not all(name in module._modules for name in ADAPTER) or not isinstance(names := module.lora_A, nn.ModuleDict):
        return None
    if not names or not all(type(each) is nn.Linear for each in names.values()):
        return None  # adapters of an embedding or a convolution
    kind = f"{type(module).__module__.rpartition('.')[2]}.{type(module).__name__}"
    if (forward := own_forward(module)) is None:
        return f"the forward of a {kind} was replaced before"
    base: Any = module.base_layer
    if base._modules:
        return f"the base of a {kind} has modules of its own"
    key = (type(module), forward, plain_attributes(module))
    if key not in forms:
        forms[key] = _why_not(module, kind)
    why = forms[key]
    return why if why is not None else replace_forward(module, "lora", _adapted)


def _why_not(module: nn.Module, kind: str) -> str | None:
    """Return why the forward of the module's class cannot be replaced. It is tried with small layers: the module's own
    may be gigabytes, packed, or not here."""
    generator = torch.Generator().manual_seed(3)
    name, scaling = "probe", 1.75
    base, inner, outer = (
        random_linear(inside, outside, generator)
        for inside, outside in ((INSIDE, OUTSIDE), (INSIDE, RANK), (RANK, OUTSIDE))
    )
    probe = copy.copy(module)
    probe.__dict__ |= {"scaling": {name: scaling}, "_active_adapter": [name], "merged_adapters": []}
    probe.__dict__ |= {"_disable_adapters": False, "lora_variant": {}, "use_dora": {name: False}}
    probe._modules = {**module._modules, "base_layer": base}
    for place, layer in (("lora_A", inner), ("lora_B", outer), ("lora_dropout", nn.Identity())):
        probe._modules[place] = nn.ModuleDict({name: layer})
    x = torch.randn(5, INSIDE, generator=generator, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = type(module).forward(probe, x)
            expected = base(x) + scaling * outer(inner(x))
            if isinstance(found, torch.Tensor) and torch.allclose(found, expected, rtol=1e-7, atol=1e-7):
                return None
    except Exception as error:  # whatever an unknown module raises means that it is not of this form
        return f"{kind} could not be tried: {type(error).__name__}"
    return f"{kind} computes something else than base(x) + scaling * B(A(x))"


def _adapted(original: Forward) -> Forward:
    from ds_slide.kernels.lora.low_rank import LARGEST_RANK, LowRank

    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        name = None if args or kwargs else _only_adapter(self, x)
        if name is None or (inner := self.lora_A[name]).out_features > LARGEST_RANK:
            return original(self, x, *args, **kwargs)
        low_rank = LowRank(inner(self.lora_dropout[name](x)), self.lora_B[name].weight, self.scaling[name])
        result = self.base_layer(x)
        return low_rank.added_to(result) if result.dtype == x.dtype else original(self, x)

    return forward


def _only_adapter(layer: Any, x: Any) -> str | None:
    """Return the name of the adapter that the kernel adds to the base's result for `x`. None where PEFT does something
    else, or with other data types, or where the kernel gains nothing."""
    if torch.compiler.is_compiling() or not isinstance(x, torch.Tensor) or not gains_on(x):
        return None
    if layer.disable_adapters or layer.merged or autocast_dtype(x.device.type) is not None:
        return None
    active = [each for each in layer.active_adapters if each in layer.lora_A]
    if len(active) != 1 or active[0] in getattr(layer, "lora_variant", ()) or layer.use_dora.get(active[0]):
        return None
    inner, outer = layer.lora_A[active[0]], layer.lora_B[active[0]]
    if type(outer) is not nn.Linear or outer._parameters["bias"] is not None or _is_watched(outer):
        return None
    return active[0] if x.dtype == inner.weight.dtype == outer.weight.dtype else None


def _is_watched(module: Any) -> bool:
    """Whether code of the client runs when the module is called."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__
