"""Models whose linear layers have packed weights, by bitsandbytes and as other libraries keep them, with adapters."""

from __future__ import annotations

from typing import Any

import torch
from harness import Batch, causal_loss, llama, to_bf16
from torch import nn

BITSANDBYTES = ("nf4", "nf4_double", "fp4", "int8")
PLAIN = ("fp8", "buffers", "mixed", "subclass")
TORCHAO = ("torchao-int8", "torchao-float8")
SUBCLASSES = ("subclass", *TORCHAO)
TARGETS = ("q_proj", "v_proj", "down_proj")
SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 5}


class Fp8Linear(nn.Module):
    """A frozen fp8 weight ([out, in]) with an fp32 scale for each 64 x 64 of it, as transformers' fine-grained fp8."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        out, into = linear.weight.shape
        tiles = linear.weight.detach().float().view(out // 64, 64, into // 64, 64)
        scale = tiles.abs().amax(dim=(1, 3)) / 448.0
        packed = (tiles / scale[:, None, :, None]).view(out, into).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        self.in_features, self.out_features = into, out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight_scale_inv.float().repeat_interleave(64, 0).repeat_interleave(64, 1)
        return nn.functional.linear(x, (self.weight.float() * scale).to(x.dtype))


class OddLinear(nn.Module):
    """A frozen weight out of parameters of many data types: int8 codes ([out, in]), bf16 scales of the rows, an int64
    order of the rows, and a bool for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        out, into = weight.shape
        scales = (weight.abs().amax(1) / 127.0).bfloat16()
        tensors = {
            "codes": (weight / scales[:, None]).round().to(torch.int8),
            "scales": scales,
            "rows": torch.randperm(out),
            "kept": torch.rand(out) < 0.9,
        }
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.in_features, self.out_features = into, out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.codes * (self.scales * self.kept)[:, None]
        return nn.functional.linear(x, weight[self.rows].to(x.dtype))


class BufferLinear(nn.Module):
    """Two packed 4-bit numbers a byte in an int32 buffer, with fp16 scales and packed zeros, as GPTQ keeps them: no
    parameter at all."""

    def __init__(self, linear: nn.Linear, group: int = 32) -> None:
        super().__init__()
        weight = linear.weight.detach().float().t().contiguous()  # [in, out]
        into, out = weight.shape
        groups = weight.view(into // group, group, out)
        scales = groups.abs().amax(1).clamp_min(1e-8) / 7.0
        codes = (groups / scales[:, None]).round().clamp(-8, 7).to(torch.int32).add_(8).view(into, out)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        self.register_buffer("qweight", (codes.view(into // 8, 8, out) << shifts[None, :, None]).sum(1).to(torch.int32))
        self.register_buffer("scales", scales.half())
        self.register_buffer("qzeros", torch.full((into // group, out // 8), -2004318072, dtype=torch.int32))
        self.group, self.in_features, self.out_features = group, into, out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=x.device)
        codes = (self.qweight[:, None, :] >> shifts[None, :, None]) & 15
        zeros = (self.qzeros[:, :, None] >> shifts) & 15
        codes = codes.reshape(-1, self.group, self.out_features) - zeros.reshape(-1, 1, self.out_features)
        weight = (codes * self.scales[:, None].float()).view(self.in_features, self.out_features)
        return x @ weight.to(x.dtype)


class PackedTensor(torch.Tensor):
    """A weight of int8 codes ([out, in]) and fp32 scales of its rows that looks like bf16, as torchao's subclasses.
    Autograd saves it, or its transpose, for the backward of a linear layer."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> PackedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16, device=codes.device)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, weight: torch.Tensor) -> PackedTensor:
        scales = weight.float().abs().amax(1, keepdim=True) / 127.0
        return cls((weight.float() / scales).round().to(torch.int8), scales)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, torch.Tensor], _context: None, _size: Any, _stride: Any) -> Any:
        return cls(tensors["codes"], tensors["scales"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.t.default, torch.ops.aten.detach.default):
            return cls(*(function(each) for each in (args[0].codes, args[0].scales)))
        options = kwargs or {}
        if function is torch.ops.aten._to_copy.default and options.get("dtype", torch.bfloat16) == torch.bfloat16:
            return cls(*(each.to(options.get("device")) for each in (args[0].codes, args[0].scales)))
        plain = [(a.codes * a.scales).bfloat16() if isinstance(a, cls) else a for a in args]
        return function(*plain, **options)


class Adapted(nn.Module):
    """A packed layer with a low-rank addition."""

    def __init__(self, base: nn.Module, dtype: torch.dtype, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features).mul_(0.05).to(dtype))
        self.up = nn.Parameter(torch.randn(base.out_features, rank).mul_(0.05).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = x.to(self.down.dtype) @ self.down.t() @ self.up.t()
        return self.base(x) + added.to(x.dtype)


def packed_linear(linear: nn.Linear, kind: str) -> nn.Module:
    """The layer with its weight packed as `kind` says."""
    if kind == "fp8":
        return Fp8Linear(linear)
    if kind == "mixed":  # most of the block stays in bf16
        return OddLinear(linear) if linear.in_features == linear.out_features else linear
    if kind == "buffers":
        return BufferLinear(linear)
    if kind == "subclass":
        linear.weight = nn.Parameter(PackedTensor.of(linear.weight.detach()), requires_grad=False)
        return linear
    if kind in TORCHAO:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        quantize_(linear, Int8WeightOnlyConfig() if kind == "torchao-int8" else Float8WeightOnlyConfig())
        return linear
    import bitsandbytes

    sizes = (linear.in_features, linear.out_features)
    if kind == "int8":
        packed = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
        weight = bitsandbytes.nn.Int8Params(linear.weight.detach().clone(), requires_grad=False)
    else:
        options = {"compress_statistics": kind == "nf4_double", "quant_type": kind[:3]}
        packed = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, **options)
        weight = bitsandbytes.nn.Params4bit(
            linear.weight.detach().clone(), requires_grad=False, module=packed, **options
        )
    packed.weight = weight
    return packed.to("cpu")


def pack(model: nn.Module, kind: str) -> nn.Module:
    """Pack all linear layers inside the blocks of `model`."""
    for layer in model.model.layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, packed_linear(child, kind))
    return model


def packed_model(kind: str, *, dtype: torch.dtype = torch.bfloat16, checkpoints: Any = None, **shape: Any) -> nn.Module:
    """A frozen bf16 Llama whose layers are packed, with adapters in `dtype`. `checkpoints`: the arguments of gradient
    checkpointing, if any."""
    model = pack(to_bf16(llama(0, **(SHAPE | shape))), kind)
    model.requires_grad_(False)
    torch.manual_seed(1)
    for layer in model.model.layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if name in TARGETS:
                    setattr(parent, name, Adapted(child, dtype))
    if checkpoints is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoints)
        model.enable_input_require_grads()
    return model.train()


def forward_between(engine: Any, batch: Batch) -> torch.Tensor:
    """A loss, and an evaluation before its backward, after which other slots of the window hold the blocks."""
    loss = causal_loss(engine, batch)
    with torch.no_grad():
        engine(**batch)
    return loss
