"""Shapes that only benchmarks train, added to the presets of examples/finetune_models.py; models in host memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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

# 4.36 G parameters: six of the 48 blocks of Qwen3-30B-A3B, whose states fit a host of 128 GiB.
finetune_models.PRESETS["qwen3-30b-a3b-6-blocks"] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def with_adapters(model: Any, rank: int) -> Any:
    """LoRA on all linear layers, as a script prepares it for gradient checkpointing."""
    from peft import LoraConfig

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return with_adapter(model, config)


def build_on_accelerator(name: str, device: torch.device, seed: int) -> Any:
    """The model in bf16 with its weights on `device`."""
    return finetune_models.build_model(name, dtype=torch.bfloat16, device=device, seed=seed)


def build_in_host_memory(name: str, device: torch.device, seed: int) -> Any:
    """The model in bf16 with its weights in host memory, made one module at a time on `device`.

    Never more than the bf16 weights exist, and never more than one module's on the device: random numbers for 12 G
    parameters take minutes on a processor, and a card that is too small for the weights cannot make them at once.
    """
    return in_host_memory(
        finetune_models.build_model(name, dtype=torch.bfloat16, device="meta", seed=seed), device, seed
    )


def in_host_memory(model: Any, device: torch.device, seed: int) -> Any:
    """A model of transformers on the meta device, with random weights in host memory, made likewise."""
    torch.manual_seed(seed)
    for module in model.modules():
        if not any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            continue
        module.to_empty(device=device, recurse=False)
        model._init_weights(module)
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if isinstance(tensor, torch.nn.Parameter):
                    tensor.data = tensor.data.to("cpu")
                elif tensor is not None and tensor.numel():
                    # Tables such as the rotary one are read where the model computes, and are small.
                    tensors[key] = tensor.to(device)
    model.tie_weights()
    return model
