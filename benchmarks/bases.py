"""Frozen bases for adapters: linear layers and fused experts, packed where the model computes, one at a time.

Each layer except the head is packed, as transformers does it. The layers are bitsandbytes' own, with the settings that
`BitsAndBytesConfig` gives them. For fp8 there is one here: transformers' layer fetches its kernels from the Internet.
Fused experts are packed in 4 bits alone, as `examples/packed_experts.py` does it, and else stay in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

BASES = ("bf16", "nf4", "nf4-double", "int8", "fp8", "torchao-int8", "torchao-fp8")
TARGETS = ("all-linear", "attention", "experts")
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_ATTENTION += ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]  # DeepSeek's
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_TILE = 128
_OUTLIERS = 6.0
"""What transformers gives an 8-bit layer: columns of activations above it are multiplied in 16 bits."""


def packs(model: Any, module: nn.Module, base: str) -> bool:
    """Whether the layer's weight is packed."""
    return base != "bf16" and type(module) is nn.Linear and module is not model.get_output_embeddings()


def packed(linear: nn.Linear, base: str) -> Any:
    """The layer with its weight packed, on the device of the weight."""
    weight = linear.weight.detach()
    if base == "fp8":
        return Fp8Linear(weight, linear.bias)
    if base.startswith("torchao"):
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        quantize_(linear, Int8WeightOnlyConfig() if base == "torchao-int8" else Float8WeightOnlyConfig())
        return linear
    import bitsandbytes

    layers: Any = bitsandbytes.nn
    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    layer: Any
    if base == "int8":
        layer = layers.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=_OUTLIERS, device="meta")
        # Only a move away from the processor packs.
        layer.weight = layers.Int8Params(weight.cpu(), requires_grad=False).to(weight.device)
    else:
        options = {"compress_statistics": base == "nf4-double", "quant_type": "nf4"}
        layer = layers.Linear4bit(*sizes, compute_dtype=torch.bfloat16, device="meta", **options)
        layer.weight = layers.Params4bit(weight, requires_grad=False, module=layer, **options).to(weight.device)
    layer.bias = linear.bias
    return layer


def pack_experts(module: nn.Module, name: str, experts: Iterable[Tensor], base: str) -> None:
    """Replace a 3-D parameter by the packed bytes of `experts`, in host memory."""
    from packed_experts import put_packed

    shape = module._parameters[name].shape  # type: ignore[union-attr]
    put_packed(module, name, experts, shape, "nf4", double=base == "nf4-double")


def kept_on(home: torch.device, parameter: Any) -> Any:
    """The parameter with its memory on `home`, and what bitsandbytes keeps beside it."""
    if hasattr(parameter, "SCB"):
        return parameter.to(home)
    if hasattr(parameter, "__tensor_flatten__"):  # torchao's
        return nn.Parameter(parameter.detach().to(home), requires_grad=False)
    if parameter.device != home:
        # All threads touch the new pages first. One thread alone would need longer for them than the copy takes.
        parameter.data = torch.empty_like(parameter.data, device=home).zero_().copy_(parameter.data)
    if (state := getattr(parameter, "quant_state", None)) is not None:
        state.to(home)
    return parameter


def mark(model: Any, base: str) -> None:
    """Tell PEFT which layers it finds, as transformers does."""
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = base.startswith("nf4"), base == "int8"


class Fp8Linear(nn.Linear):
    """A frozen fp8 weight ([out, in]) with a scale for each 128 x 128 of it, as transformers keeps it. It is widened in
    forward, and autograd keeps the wide one."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        out, into = weight.shape
        super().__init__(into, out, bias=False, device="meta")
        padded = nn.functional.pad(weight.float(), (0, -into % _TILE, 0, -out % _TILE))
        tiles = padded.unflatten(1, (-1, _TILE)).unflatten(0, (-1, _TILE))
        scales = (tiles.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max).bfloat16()
        wide = _by_tiles(scales.float(), weight.shape)
        self.weight = nn.Parameter((weight.float() / wide).to(torch.float8_e4m3fn), requires_grad=False)
        # In bf16, which DeepSpeed would make of fp32.
        self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        wide = self.weight.to(x.dtype) * _by_tiles(self.weight_scale_inv, self.weight.shape)
        return nn.functional.linear(x, wide, self.bias)


def _by_tiles(scales: Tensor, shape: torch.Size) -> Tensor:
    return scales.repeat_interleave(_TILE, 0)[: shape[0]].repeat_interleave(_TILE, 1)[:, : shape[1]]


def lora(rank: int, targets: str) -> Any:
    """PEFT's config. `experts`: attention and fused experts."""
    from peft import LoraConfig

    chosen = "all-linear" if targets == "all-linear" else _ATTENTION
    experts = {"target_parameters": _EXPERTS} if targets == "experts" else {}
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=chosen, task_type="CAUSAL_LM", **experts)


def elements(model: nn.Module) -> int:
    """Parameters of the model as if nothing was packed. A byte of bitsandbytes' 4 bits has two."""
    in_experts = {id(module.original) for module in model.modules() if isinstance(module, ParametrizationList)}
    return sum(
        parameter.numel() * (2 if hasattr(parameter, "quant_type") or id(parameter) in in_experts else 1)
        for parameter in model.parameters()
    )
