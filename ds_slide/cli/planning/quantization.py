"""Layers with packed weights on the meta device: the layouts of the libraries that pack them, and no library.

    nf4          bitsandbytes, 4 bits: uint8 [n / 2, 1], beside it fp32 `absmax` for 64 weights
    nf4-double   the same with uint8 `absmax`, and a nested fp32 `absmax` for 256 of these
    nf4-experts  nf4-double for linear layers, and for fused experts too (`examples/packed_experts.py`)
    int8         bitsandbytes, 8 bits: int8 [out, in], beside it fp32 `SCB` for each row
    fp8          transformers' fine-grained fp8: float8_e4m3fn [out, in], and a parameter for 128 x 128 weights

The layers that are packed are those that transformers packs: linear layers except the head. Fused experts, which are
3-D parameters, are packed by "nf4-experts" alone. A forward widens all experts of a layer, and autograd keeps them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrize import register_parametrization

_OF_ABSMAX, _OF_NESTED, _TILE = 64, 256, 128
"""Weights of one `absmax`; numbers of one nested `absmax`; rows and columns of a scale of fp8."""


def pack(model: Any, kind: str) -> None:
    """Freeze the model, and pack its linear layers and experts."""
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = get_keys_to_not_convert(model)
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and should_convert_module(name, kept):
            model.set_submodule(name, _PackedLinear(module, kind))
        elif kind == "nf4-experts" and hasattr(module, "num_experts"):
            for each in [name for name, parameter in module._parameters.items() if parameter is not None]:
                if module._parameters[each].dim() == 3:
                    _pack_experts(module, each)


def _pack_experts(module: nn.Module, name: str) -> None:
    """Pack the 3-D parameter `name` as bitsandbytes does (`replace_parameter_4bit`): a parametrization widens it."""
    parameter: Any = module._parameters[name]
    register_parametrization(module, name, _Widened(parameter), unsafe=True)
    parametrizations: Any = module.parametrizations
    parametrizations[name].original = _frozen(_meta(-(-parameter.numel() // 2), 1, dtype=torch.uint8))


class _Widened(nn.Module):
    """A parametrization: packed experts, uint8 [n / 2, 1] -> experts [e, out, in] in bf16."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.quant_state = _state(-(-parameter.numel() // _OF_ABSMAX), double=True)
        self._shape = parameter.shape

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.new_empty(self._shape, dtype=torch.bfloat16)


class _PackedLinear(nn.Linear):
    """A frozen linear layer with a packed weight."""

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.bias = linear.bias
        out, into = self.out_features, self.in_features
        if kind == "fp8":
            scales = _meta(-(-out // _TILE), -(-into // _TILE))
            self.weight = _frozen(_meta(out, into, dtype=torch.float8_e4m3fn))
            self.weight_scale_inv = _frozen(scales)
        elif kind == "int8":
            self.weight = _frozen(_meta(out, into, dtype=torch.int8))
            beside: Any = self.weight
            beside.CB, beside.SCB = self.weight.data, _meta(out)
        else:
            self.weight = _frozen(_meta(-(-out * into // 2), 1, dtype=torch.uint8))
            vars(self.weight)["quant_state"] = _state(-(-out * into // _OF_ABSMAX), double=kind != "nf4")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (self.out_features, self.in_features)
        result: torch.Tensor = _Product.apply(x, self.weight, shape)
        return result if self.bias is None else result + self.bias


def _state(blocks: int, *, double: bool) -> SimpleNamespace:
    """Return bitsandbytes' quantisation state of a weight with `blocks` numbers in `absmax`."""
    if not double:
        return SimpleNamespace(absmax=_meta(blocks), code=_meta(16))
    nested = SimpleNamespace(absmax=_meta(-(-blocks // _OF_NESTED)), code=_meta(256))
    return SimpleNamespace(absmax=_meta(blocks, dtype=torch.uint8), code=_meta(16), offset=_meta(), state2=nested)


class _Product(torch.autograd.Function):
    """The product with a weight that is widened for it, in forward and again in backward, and not saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        ctx.packed, ctx.shape = packed, shape
        # A trace counts the bytes of the operator's input and of its result.
        return functional.linear(x, packed.new_empty(shape, dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient @ ctx.packed.new_empty(ctx.shape, dtype=gradient.dtype), None, None


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
