"""Patches norms: LayerNorm is found by its class, an RMS norm by what it computes.

A module whose only parameter is a 1-D weight may be any norm. It is tried on random numbers in fp32 and bf16, never on
its own weights, which may be partitioned or empty. It is an RMS norm only if it agrees with one of four forms.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_slide.patching.kinds import (
    Forward,
    ForwardPatch,
    autocasts_to_fp32,
    gains_on,
    interprets,
    is_one_token,
    own_forward,
    plain_attributes,
    replace_forward,
    say_unused,
)

EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")
# Another order of the same operations changes the last bit of a few bf16 values. Rounding in another place changes
# every third value.
SAME_BF16_SHARE = 0.98


@dataclass(frozen=True)
class RmsForm:
    """`weight_offset`: added to the weight in fp32. `round_before_weight`: the normalised value is rounded first."""

    epsilon_name: str
    weight_offset: float
    round_before_weight: bool


def patch_norm(module: nn.Module, forms: dict[Any, RmsForm | str]) -> ForwardPatch | str | None:
    """Patch a norm. `forms`: the probe of every class with the same size and settings."""
    if isinstance(module, nn.LayerNorm):
        return _patch_layer_norm(module)
    shape = _weight_shape(module)
    if shape is None:
        return None
    name = type(module).__name__
    if (forward := own_forward(module)) is None:
        return f"the forward of a {name} was replaced before"
    key = (type(module), forward, shape, plain_attributes(module))
    if key not in forms:
        forms[key] = find_rms_form(module, shape)
    form = forms[key]
    if isinstance(form, str):
        return form
    return replace_forward(module, "norm", lambda original: _rms_forward(original, form))


def _patch_layer_norm(module: nn.LayerNorm) -> ForwardPatch | str:
    if own_forward(module) is not nn.LayerNorm.forward:
        return f"{type(module).__name__} is a LayerNorm with a forward of its own"
    if len(module.normalized_shape) != 1:
        return f"a LayerNorm over {len(module.normalized_shape)} dimensions"
    return replace_forward(module, "norm", _layer_norm_forward)


def _weight_shape(module: nn.Module) -> tuple[int, ...] | None:
    if module._modules or list(module._parameters) != ["weight"] or module._buffers:
        return None
    weight = module._parameters["weight"]
    if weight is None:
        return None
    shape = tuple(getattr(weight, "ds_shape", weight.shape))
    return shape if len(shape) == 1 else None


def find_rms_form(module: nn.Module, shape: tuple[int, ...]) -> RmsForm | str:
    """Return the form of RMS norm that the forward of the module's class computes, or the reason why it has none."""
    name = type(module).__name__
    epsilon_name = next((e for e in EPSILON_NAMES if isinstance(getattr(module, e, None), float)), None)
    if epsilon_name is None:
        return f"{name} has no epsilon ({', '.join(EPSILON_NAMES)})"
    forms = [RmsForm(epsilon_name, offset, early) for offset in (0.0, 1.0) for early in (True, False)]
    generator = torch.Generator().manual_seed(1)
    # The third row is small enough for epsilon to count, the fourth large enough to overflow if squared in fp16.
    scales = torch.tensor([1, 30, 1e-3, 1e3] * 2, device="cpu").view(8, 1)
    x = torch.randn(8, *shape, generator=generator, device="cpu") * scales
    weight = torch.randn(shape, generator=generator, device="cpu")
    for dtype in (torch.float32, torch.bfloat16):
        probe = copy.copy(module)
        probe._parameters = {"weight": nn.Parameter(weight.to(dtype), requires_grad=False)}
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                found = type(module).forward(probe, x.to(dtype))
        except Exception as error:  # whatever an unknown module raises means that it is not a norm
            return f"{name} could not be tried: {type(error).__name__}"
        if not isinstance(found, torch.Tensor) or found.dtype != dtype or found.shape != x.shape:
            return f"{name} does not return what it is given"
        forms = [form for form in forms if _agrees(found, _rms_norm(x.to(dtype), weight.to(dtype), module, form))]
    if not forms:
        return f"{name} computes something else than a root-mean-square norm"
    return forms[0]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, module: nn.Module, form: RmsForm) -> torch.Tensor:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + getattr(module, form.epsilon_name))
    if form.round_before_weight:
        return normal.to(x.dtype) * (weight + form.weight_offset)
    return (normal * (weight.float() + form.weight_offset)).to(x.dtype)


def _agrees(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.dtype == torch.float32:
        return torch.allclose(found, expected, rtol=2e-6, atol=1e-7)
    same = (found == expected).float().mean()
    return bool(same >= SAME_BF16_SHARE) and torch.allclose(found, expected, rtol=2**-7, atol=1e-7)


def _rms_forward(original: Forward, form: RmsForm) -> Forward:
    from ds_slide.kernels.norm.rms_norm import rms_norm

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        weight = self.weight
        if len(args) == 1 and not kwargs and args[0].dtype == weight.dtype and gains_on(args[0]):
            epsilon = getattr(self, form.epsilon_name)
            return rms_norm(
                args[0], weight, epsilon, offset=form.weight_offset, round_before_weight=form.round_before_weight
            )
        _say_unused(weight, args)
        return original(self, *args, **kwargs)

    return forward


def _layer_norm_forward(original: Forward) -> Forward:
    from ds_slide.kernels.norm.layer_norm import layer_norm

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        weight, bias = self.weight, self.bias
        if len(args) == 1 and not kwargs and gains_on(args[0]) and not autocasts_to_fp32(args[0]):
            x = args[0]
            if all(parameter is None or parameter.dtype == x.dtype for parameter in (weight, bias)):
                return layer_norm(x, weight, bias, self.eps)
        _say_unused(weight, args)
        return original(self, *args, **kwargs)

    return forward


def _say_unused(weight: torch.Tensor | None, args: tuple[Any, ...]) -> None:
    if args and (args[0].is_cuda or interprets()) and not is_one_token(args[0]):
        wide = " under autocast" if torch.is_autocast_enabled(args[0].device.type) else ""
        say_unused("norm", f"x is {args[0].dtype}, weight {None if weight is None else weight.dtype}{wide}")
