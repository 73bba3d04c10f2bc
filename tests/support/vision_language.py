"""Tiny models of Hugging Face in the shapes that ranks differ in: images, or routed tokens, on some ranks only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

VOCABULARY, IMAGE = 64, 60
WIDTH = 32
LAYERS = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
LANGUAGE = {**LAYERS, "vocab_size": VOCABULARY, "num_key_value_heads": 1}


def llava() -> nn.Module:
    vision = CLIPVisionConfig(**LAYERS, image_size=16, patch_size=8, projection_dim=WIDTH)
    text = LlamaConfig(**LANGUAGE)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE))


def qwen3_vl() -> nn.Module:
    vision = {
        "depth": 3,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": WIDTH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {**LANGUAGE, "head_dim": 16, "rope_parameters": rope}
    config = Qwen3VLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, video_token_id=61, vision_start_token_id=62
    )
    return Qwen3VLForConditionalGeneration(config)


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**LANGUAGE, num_local_experts=4, num_experts_per_tok=1))


def frozen(build: Any, *words: str) -> Any:
    """`build` with the parameters frozen that have one of these words in their names."""

    def frozen_model() -> nn.Module:
        model: nn.Module = build()
        for name, parameter in model.named_parameters():
            if any(word in name for word in words):
                parameter.requires_grad_(False)
        return model

    return frozen_model


def _tokens(rank: int, number: int, length: int = 12) -> tuple[torch.Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randint(0, 50, (2, length), generator=generator), generator


def llava_batch(rank: int, number: int) -> Mapping[str, Any]:
    """Images on every other rank, in turn."""
    tokens, generator = _tokens(rank, number)
    if (rank + number) % 2:
        return {"input_ids": tokens, "labels": tokens}
    tokens[:, 2:6] = IMAGE  # four patches
    return {
        "input_ids": tokens,
        "labels": tokens,
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
    }


def qwen3_vl_batch(rank: int, number: int) -> Mapping[str, Any]:
    tokens, generator = _tokens(rank, number)
    if (rank + number) % 2:
        return {"input_ids": tokens, "labels": tokens}
    tokens[:, 1], tokens[:, 2:6] = 62, IMAGE  # 4 x 4 patches, merged by 2 x 2
    return {
        "input_ids": tokens,
        "labels": tokens,
        "mm_token_type_ids": (tokens == IMAGE).int(),
        "pixel_values": torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
    }


def mixtral_batch(rank: int, number: int) -> Mapping[str, Any]:
    """The same token again and again, so that a rank routes all of them to one expert of each layer."""
    tokens = torch.full((2, 6), 7 * rank + number % 5)
    return {"input_ids": tokens, "labels": tokens}
