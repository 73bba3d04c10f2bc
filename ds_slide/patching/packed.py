"""Prepares modules with packed weights of bitsandbytes for weights that move.

bitsandbytes keeps a 4-bit weight for backward outside of autograd's saved tensors: on the context of its function, as
`weight.view(-1, 1)`. That view would show whatever block has the slot by then. So `view` returns the parameter itself
where it has that shape already, and the engine binds the parameter to the right bytes before the block's backward.
The scales need nothing: the context has the object that holds them, and the engine binds these tensors, too.

PEFT's DoRA calls `module.weight = module.weight.to(device)` in a forward on the CPU. A new parameter would keep the
slot for good, so `to` returns the parameter itself where nothing changes.

On a CPU with AVX-512 an evaluation would repack the weights for good, in memory of its own. It computes with the usual
format instead.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_slide.errors import SlideConfigError
from ds_slide.model.carried import is_packed, packed_tensors

_REPACKS = "support_avx512bf16_for_cpu"
"""Attribute of bitsandbytes' linear layers: whether an evaluation on the CPU repacks the weights."""


class _ViewsItself:
    """The `view` of a packed parameter, [n, 1]."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def __call__(self, *shape: Any) -> torch.Tensor:
        parameter = self._parameter
        if shape == (-1, 1) and parameter.dim() == 2 and parameter.shape[1] == 1:
            return parameter
        return torch.Tensor.view(parameter, *shape)


class _StaysItself:
    """The `to` of a packed parameter. bitsandbytes makes a new parameter even where nothing changes."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameter = self._parameter
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        moves = device is not None and device not in (parameter.device, torch.device(parameter.device.type))
        if moves or dtype not in (None, parameter.dtype):
            moved: torch.Tensor = type(parameter).to(parameter, *args, **kwargs)
            return moved
        return parameter


@dataclass(frozen=True)
class _Prepared:
    module: nn.Module
    parameter: nn.Parameter
    repacked: bool | None
    """The module's setting before."""

    @classmethod
    def of(cls, module: nn.Module, parameter: nn.Parameter) -> _Prepared:
        vars(parameter)["to"] = _StaysItself(parameter)
        if getattr(parameter, "quant_state", None) is not None:
            vars(parameter)["view"] = _ViewsItself(parameter)
        repacked: bool | None = getattr(module, _REPACKS, None)
        if repacked is not None:
            setattr(module, _REPACKS, False)
        return cls(module, parameter, repacked)

    def undo(self) -> None:
        for name in ("view", "to"):
            vars(self.parameter).pop(name, None)
        if self.repacked is not None:
            setattr(self.module, _REPACKS, self.repacked)


def prepare_packed(root: nn.Module, carried: Collection[int], device: torch.device) -> list[_Prepared]:
    """Prepare the modules with weights packed by bitsandbytes in `root`. `carried`: tensors by id that move
    with their blocks; others beside packed weights are brought to `device`. Raises SlideConfigError for a bitsandbytes
    that keeps other views for backward."""
    for tensor in packed_tensors(root):
        if id(tensor) not in carried and tensor.device.type != "meta":
            tensor.data = tensor.data.to(device)
    found = [
        (module, parameter)
        for module in root.modules()
        for parameter in module._parameters.values()
        if parameter is not None and is_packed(module, parameter)
    ]
    if any(getattr(parameter, "quant_state", None) is not None for _, parameter in found):
        _require_known_context(device)
    return [_Prepared.of(module, parameter) for module, parameter in found]


def _require_known_context(device: torch.device) -> None:
    """Raise SlideConfigError where a backward of bitsandbytes would read another tensor than the parameter."""
    bitsandbytes: Any = sys.modules.get("bitsandbytes")
    if bitsandbytes is None:  # another library with the same attributes
        return
    with torch.enable_grad():
        layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").to(device)
        vars(layer.weight)["view"] = _ViewsItself(layer.weight)
        output = layer(torch.zeros(1, 64, device=device, requires_grad=True))
    kept = [each for each in getattr(output.grad_fn, "tensors", ()) if each is not None]
    vars(layer.weight).pop("view")
    if any(each is not layer.weight for each in kept):
        raise SlideConfigError(
            f"bitsandbytes {bitsandbytes.__version__} keeps another tensor for backward than the 4-bit weight itself, "
            "whose memory a streamed block gives to others; use bitsandbytes 0.50.2, which is tested"
        )
