"""Shapes that only benchmarks train, added to the presets of examples/finetune_models.py; models in host memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bases
import torch

# The presets have one home, beside the example script.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import finetune_models

from ds_slide.cli.planning.model import with_adapter

# 12.06 G parameters: 145 GB of fp32 states, more than most hosts have, with blocks of 317 M that fit a small card.
finetune_models.PRESETS["llama-12b"] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 37,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# 21.68 G parameters: what 8-bit moments, gradients included, leave room for in 126 GiB of memory and 55 GB of disk.
finetune_models.PRESETS["llama-22b"] = {
    **finetune_models.PRESETS["llama-12b"],
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 47,
    "num_attention_heads": 48,
    "num_key_value_heads": 48,
}
# 3.40 G parameters: the shape of the other pages with a head of its own, 0.31 G of them.
finetune_models.PRESETS["qwen2.5-3b-untied"] = {**finetune_models.PRESETS["qwen2.5-3b"], "tie_word_embeddings": False}

# Stock's longest sequence: its states of all 32 blocks are more than most hosts have, and with inputs of blocks in host
# memory the GPU needs as much for 8 of them.
finetune_models.PRESETS["llama3-8b-8-blocks"] = {**finetune_models.PRESETS["llama3-8b"], "num_hidden_layers": 8}

# 30.53 G parameters, 29.0 G of them in 128 fused experts of each block.
finetune_models.PRESETS["qwen3-30b-a3b"] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
# 4.36 G parameters: six of its blocks, whose states fit a host of 128 GiB.
finetune_models.PRESETS["qwen3-30b-a3b-6-blocks"] = {
    **finetune_models.PRESETS["qwen3-30b-a3b"],
    "num_hidden_layers": 6,
}
# 6.85 G parameters.
finetune_models.PRESETS["qwen3-30b-a3b-10-blocks"] = {
    **finetune_models.PRESETS["qwen3-30b-a3b"],
    "num_hidden_layers": 10,
}
# 235.1 G parameters, 227.1 G of them in experts: in 4 bits the largest mixture for 125 GiB of host memory.
finetune_models.PRESETS["qwen3-235b-a22b"] = {
    **finetune_models.PRESETS["qwen3-30b-a3b"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
# The same kind for trials on a processor.
finetune_models.PRESETS["tiny-mixture"] = {
    **finetune_models.PRESETS["qwen3-30b-a3b"],
    "vocab_size": 264,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
# Two of the 61 blocks of DeepSeek-V3, 11.5 G parameters each: 23 GB in bf16, of which 22.5 GB are experts.
finetune_models.PRESETS["deepseek-v3-2-blocks"] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 0,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

# Shapes with a vision tower. "tiny-vl" is for a machine without a GPU.
VISION_LANGUAGE: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-3b": {
        "text_config": {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048},
    },
    "tiny-vl": {
        "text_config": {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
            "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        },
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503,
    },
}  # fmt: skip


def with_adapters(model: Any, rank: int, targets: str = "all-linear", seed: int = 0) -> Any:
    """LoRA, as a script prepares it for gradient checkpointing. PEFT makes it in fp32 on some bases and in bf16 on
    others; here it is in bf16 for every system, as DeepSpeed would convert it."""
    torch.manual_seed(seed)
    model = with_adapter(model, bases.lora(rank, targets))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return model


def build_on_accelerator(name: str, device: torch.device, seed: int, base: str = "bf16") -> Any:
    """The model with its weights on `device`, in bf16 or packed."""
    if base != "bf16":
        return one_by_one(_without_weights(name), device, device, seed, base)
    return finetune_models.build_model(name, dtype=torch.bfloat16, device=device, seed=seed)


def build_in_host_memory(name: str, device: torch.device, seed: int, base: str = "bf16") -> Any:
    """The model with its weights in host memory, in bf16 or packed, made one module at a time on `device`.

    Never more than the bf16 or packed weights exist, and never more than one module's on the device: random numbers for
    12 G parameters take minutes on a processor, and a card that is too small for the weights cannot make them at once.
    """
    return one_by_one(_without_weights(name), device, torch.device("cpu"), seed, base)


def _without_weights(name: str) -> Any:
    return finetune_models.build_model(name, dtype=torch.bfloat16, device="meta")


def build_partitioned(name: str, zero_config: dict[str, Any], seed: int) -> Any:
    """The model in bf16, each module divided among the ranks as soon as it exists, as `zero.Init` does."""
    return finetune_models.build_model(
        name, dtype=torch.bfloat16, device=torch.device("cpu"), seed=seed, zero_config=zero_config
    )


def build_vision_language(name: str, device: torch.device, seed: int) -> Any:
    """A shape of VISION_LANGUAGE in bf16 with its weights in host memory."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(**VISION_LANGUAGE[name], tie_word_embeddings=True)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    return one_by_one(model, device, torch.device("cpu"), seed)


def one_by_one(model: Any, device: torch.device, home: torch.device, seed: int, base: str = "bf16") -> Any:
    """A model of transformers on the meta device gets random weights, each made and packed on `device`, kept on `home`.

    All blocks have weights of their own: on a GPU the random numbers are a small part of the time.
    """
    torch.manual_seed(seed)
    for name in [name for name, _ in model.named_modules()]:
        module = model.get_submodule(name)
        if not any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            continue
        if any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            for key, parameter in list(module._parameters.items()):
                experts = _experts_of(parameter, device, model.config)
                if base.startswith("nf4"):
                    bases.pack_experts(module, key, experts, base)
                else:
                    module._parameters[key] = torch.nn.Parameter(_together(experts, parameter, home))
            continue
        module.to_empty(device=device, recurse=False)
        model._init_weights(module)
        if bases.packs(model, module, base):
            module = bases.packed(module, base)
            model.set_submodule(name, module)
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if isinstance(tensor, torch.nn.Parameter):
                    tensors[key] = bases.kept_on(home, tensor)
                elif tensor is not None and tensor.numel():
                    # Tables such as the rotary one are read where the model computes, and are small.
                    tensors[key] = tensor.to(device)
    model.tie_weights()
    bases.mark(model, base)
    return model


def _experts_of(parameter: torch.nn.Parameter, device: torch.device, config: Any) -> Iterator[torch.Tensor]:
    """Random weights of fused experts, each expert made on `device`: all of a layer may be more than it holds."""
    for _ in range(len(parameter)):
        made = torch.empty(parameter.shape[1:], dtype=parameter.dtype, device=device)
        yield made.normal_(std=config.initializer_range)


def _together(experts: Iterator[torch.Tensor], parameter: torch.nn.Parameter, home: torch.device) -> torch.Tensor:
    made = torch.empty(parameter.shape, dtype=parameter.dtype, device=home).zero_()
    for place, each in zip(made, experts, strict=True):
        place.copy_(each)
    return made
