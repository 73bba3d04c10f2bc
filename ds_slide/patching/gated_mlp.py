"""Gated feed-forward modules: down(act(gate(x)) * up(x)), with gate and up apart or in one projection.

The replacement calls the projections as modules, so that their hooks, and adapters in their places, still work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from ds_slide.patching.kinds import (
    Forward,
    ForwardPatch,
    gains_on,
    own_forward,
    plain_attributes,
    random_linear,
    replace_forward,
)

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
APART = ("gate_proj", "up_proj", "down_proj")
PACKED = ("gate_up_proj", "down_proj")
# Sizes of the probe's own small projections: the module's projections may be gigabytes, or not here.
HIDDEN, INNER = 12, 40


@dataclass(frozen=True)
class GatedForm:
    activation: Activation
    packed: bool


def patch_gated_mlp(module: nn.Module, forms: dict[Any, GatedForm | str]) -> ForwardPatch | str | None:
    """Patch a gated feed-forward. `forms`: the probe of every class with the same settings."""
    names = next((names for names in (APART, PACKED) if all(name in module._modules for name in names)), None)
    if names is None or any(module._modules[name] is None for name in names):
        return None
    if (forward := own_forward(module)) is None:
        return f"the forward of a {type(module).__name__} was replaced before"
    others = [child for name, child in module._modules.items() if name not in names and child is not None]
    if any(child._forward_hooks or child._forward_pre_hooks or child._backward_hooks for child in others):
        return f"the activation of a {type(module).__name__} has hooks"
    settings = tuple((type(child), plain_attributes(child)) for child in others)
    key = (type(module), forward, names, plain_attributes(module), settings)
    if key not in forms:
        forms[key] = find_gated_form(module, names)
    form = forms[key]
    if isinstance(form, str):
        return form
    return replace_forward(module, "mlp", lambda original: _gated_forward(original, form))


def find_gated_form(module: nn.Module, names: tuple[str, ...]) -> GatedForm | str:
    """Return the form that the forward of the module's class computes on small projections, or why it has none."""
    name = type(module).__name__
    packed = names == PACKED
    generator = torch.Generator().manual_seed(2)
    probe = copy.copy(module)
    probe._modules = dict(module._modules)
    for child in names:
        inside, outside = (INNER, HIDDEN) if child == "down_proj" else (HIDDEN, INNER * (2 if packed else 1))
        probe._modules[child] = random_linear(inside, outside, generator)
    # The values are wide enough to reveal a clipped activation, and some are about 1, where the two gelus differ.
    x = torch.randn(24, HIDDEN, generator=generator, dtype=torch.float64, device="cpu")
    x *= torch.logspace(-1, 1, 24, dtype=torch.float64, device="cpu")[:, None]
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            with torch.enable_grad():
                found = type(module).forward(probe, x.requires_grad_())
            # Such a function computes in tiles of the sequence, for example (DeepSpeed's TiledMLP), to save memory.
            if isinstance(getattr(found, "grad_fn", None), torch.autograd.function.BackwardCFunction):
                return f"{name} computes in an autograd function of its own"
            if packed:
                gate, up = probe._modules["gate_up_proj"](x).chunk(2, dim=-1)  # type: ignore[misc]
            else:
                gate, up = probe._modules["gate_proj"](x), probe._modules["up_proj"](x)  # type: ignore[misc]
            for activation, function in ACTIVATIONS.items():
                expected = probe._modules["down_proj"](function(gate) * up)  # type: ignore[misc]
                if isinstance(found, torch.Tensor) and torch.allclose(found, expected, rtol=1e-7, atol=1e-7):
                    return GatedForm(activation, packed)
    except Exception as error:  # whatever an unknown module raises means that it is not of this form
        return f"{name} could not be tried: {type(error).__name__}"
    return f"{name} computes something else than down(act(gate) * up) with silu or gelu"


def _gated_forward(original: Forward, form: GatedForm) -> Forward:
    from ds_slide.kernels.gated.gated_activation import gated, gated_packed

    activation = form.activation

    def apart(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and gains_on(args[0]):
            return self.down_proj(gated(self.gate_proj(args[0]), self.up_proj(args[0]), activation))
        return original(self, *args, **kwargs)

    def packed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and gains_on(args[0]):
            return self.down_proj(gated_packed(self.gate_up_proj(args[0]), activation))
        return original(self, *args, **kwargs)

    return packed if form.packed else apart
