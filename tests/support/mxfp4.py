"""gpt-oss in MXFP4, as its checkpoints are: widened by transformers, and packed as raw tensors. Random weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fused_experts import COMMON, LAYERS
from harness import to_bf16
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

PROJECTIONS = ("gate_up_proj", "down_proj")
EXPERTS, INNER = 4, 64
# The base, and the parameters of its experts that have adapters.
CASES: dict[str, tuple[str, Sequence[str]]] = {
    "widened": ("widened", PROJECTIONS),
    "widened, one adapted": ("widened", PROJECTIONS[1:]),
    "packed": ("packed", ()),
    "packed, adapted": ("packed", PROJECTIONS[1:]),
}


@functools.cache
def config() -> Any:
    from transformers import GptOssConfig

    own = {"intermediate_size": INNER, "num_local_experts": EXPERTS, "head_dim": 16}
    return GptOssConfig(**(COMMON | own), initial_context_length=64, dtype="bfloat16", use_cache=False)


def write_checkpoint(path: Path) -> Path:
    """Write a checkpoint with blocks of 32 numbers in 16 bytes, [experts, out, in / 32, 16], and an exponent for each.
    Returns its folder, `path`."""
    from transformers import GptOssForCausalLM

    torch.manual_seed(0)
    saved = {}
    for name, weight in to_bf16(GptOssForCausalLM(config())).state_dict().items():
        if name.endswith(PROJECTIONS):
            experts, into, out = weight.shape
            shape = (experts, out, into // 32)
            saved[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
            saved[f"{name}_scales"] = torch.randint(118, 123, shape, dtype=torch.uint8)
        else:
            saved[name] = weight.clone()
    save_file(saved, path / "model.safetensors", metadata={"format": "pt"})
    written = config().to_dict() | {"architectures": ["GptOssForCausalLM"]}
    type(config())(**written, quantization_config={"quant_method": "mxfp4"}).save_pretrained(path)
    return path


def loaded(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    widened = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=widened, **options)


class Widened(nn.Module):
    """A parametrization: raw blocks and scales -> a 3-D parameter of experts in bf16, by transformers' own function."""

    def __init__(self, *packed: torch.Tensor) -> None:
        super().__init__()
        self.packed = packed

    def right_inverse(self, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed, self.packed = self.packed, ()
        return packed

    def forward(self, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return convert_moe_packed_tensors(blocks, scales)


def packed(folder: Path) -> Any:
    """The model with its experts as in the checkpoint."""
    from safetensors import safe_open

    model = loaded(folder).requires_grad_(False)
    with safe_open(folder / "model.safetensors", "pt") as file:
        for number, layer in enumerate(model.model.layers):
            for name in PROJECTIONS:
                place = f"model.layers.{number}.mlp.experts.{name}"
                raw = [file.get_tensor(f"{place}_{part}") for part in ("blocks", "scales")]
                register_parametrization(layer.mlp.experts, name, Widened(*raw), unsafe=True)
    return model


def adapted(model: Any, *, on: Sequence[str] = (), checkpointed: bool) -> Any:
    """With adapters on attention and on these parameters of experts, by their full names."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    names = [f"model.layers.{number}.mlp.experts.{name}" for number in range(LAYERS) for name in on]
    targets = {"target_parameters": names} if on else {}
    model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"], **targets))
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return to_bf16(model).train()


def made(folder: Path, case: str, *, checkpointed: bool = True) -> Any:
    """A model of `CASES`."""
    base, on = CASES[case]
    return adapted((packed if base == "packed" else loaded)(folder), on=on, checkpointed=checkpointed)
