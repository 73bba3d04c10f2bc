"""Model families through the engine, against the same model in plain torch with the reference AdamW, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import (
    VOCABULARY,
    Batch,
    differences,
    ds_config,
    plain_training,
    sum_gradients_by_block,
    to_bf16,
    trained,
)
from torch import nn

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 3
CLIP = 1.0

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CAUSAL = SIZES | HEADS | {"num_key_value_heads": 2, "use_cache": False, "tie_word_embeddings": False}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "use_cache": False}
GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

IMAGE = VOCABULARY - 1
"""The token in whose place parts of images come."""
MROPE = {"mrope_section": [2, 3, 3], "rope_theta": 10_000.0}

LIKE_OTHERS = ("qwen2", "qwen3", "mistral")
"""Their layers have the parts of Llama's and Gemma's."""
# name: model class, config class, config.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", CAUSAL),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", CAUSAL | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", CAUSAL),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", CAUSAL | {"head_dim": 16}),
    "mistral": ("MistralForCausalLM", "MistralConfig", CAUSAL | {"head_dim": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", CAUSAL | {"head_dim": 16, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2 | GPT2_DROPOUT),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES | HEADS | {"use_cache": False}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        SIZES | HEADS | {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0, "use_cache": False},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 3}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES | HEADS | NO_DROPOUT),
    # One layer, run four times: no list to stream.
    "albert": ("AlbertForMaskedLM", "AlbertConfig", SIZES | HEADS | NO_DROPOUT | {"embedding_size": 32}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        | {"image_size": 16, "patch_size": 4, "num_labels": 8},
    ),
    # Experts in one tensor of three dimensions, and two kinds of layers in one list.
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        CAUSAL | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        CAUSAL
        | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
    # A list of layers for images and one for text; in the first some of the text's layers add images once more.
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {
            "text_config": CAUSAL | {"head_dim": 16, "rope_scaling": {"rope_type": "default", **MROPE}},
            "vision_config": {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4}
            | {"out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
            "image_token_id": IMAGE,
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": CAUSAL | {"model_type": "llama"},
            "vision_config": {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128}
            | {"num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 16, "patch_size": 8},
            "image_token_index": IMAGE,
        },
    ),
}
WITHOUT_BLOCKS = ("albert",)
IMAGES = {"qwen3-vl": {"pixel_values": (32, 96)}, "llava": {"pixel_values": (2, 3, 16, 16)}}
"""Shapes of what a batch of two has beside its tokens, of which four of each sample stand for its image."""


class Classifier(nn.Module):
    """A model that returns logits; its loss is that of Hugging Face's models."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.body(pixel_values).float()
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels))


def cnn() -> nn.Module:
    convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=4)]
    return Classifier(*convolutions, nn.Flatten(), nn.Linear(16 * 16, 8))


def mlp() -> nn.Module:
    """Layers of different shapes: no repeated list."""
    widths = [3 * 16 * 16, 64, 32]
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())]
    return Classifier(nn.Flatten(), *layers, nn.Linear(32, 8))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    plain = {"cnn": cnn, "mlp": mlp}
    if name in plain:
        return plain[name]()
    model, config, options = FAMILIES[name]
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def data_for(name: str) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    if name in ("vit", "cnn", "mlp"):
        images = torch.randn(STEPS, 2, 3, 16, 16, generator=generator).bfloat16()
        classes = torch.randint(0, 8, (STEPS, 2), generator=generator)
        return [{"pixel_values": i, "labels": c} for i, c in zip(images, classes, strict=True)]
    tokens = torch.randint(3, IMAGE, (STEPS, 2, 24), generator=generator)
    batches = [{"input_ids": ids, "labels": ids} for ids in tokens]
    for batch in batches if name in IMAGES else ():
        is_image = torch.zeros_like(batch["input_ids"])
        is_image[:, 3:7] = 1
        batch["labels"] = batch["input_ids"].masked_fill(is_image == 1, -100)
        batch["input_ids"] = batch["input_ids"].masked_fill(is_image == 1, IMAGE)
        batch |= {what: torch.randn(*shape, generator=generator).bfloat16() for what, shape in IMAGES[name].items()}
        if name == "qwen3-vl":
            batch |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": is_image}
    return batches


def check(name: str, blocks: Callable[[int], bool], checkpointing: dict[str, Any] | None = None) -> None:
    model, reference = build(name), to_bf16(build(name))
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    if name == "t5":
        sum_gradients_by_block([*reference.encoder.block, *reference.decoder.block])
        if checkpointing is not None:
            reference.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    data = data_for(name)
    seen: list[int] = []

    def loss_of(engine: Any, batch: Batch) -> torch.Tensor:
        seen.append(len(engine.optimizer.runtime.blocks))
        loss: torch.Tensor = engine(**batch).loss
        return loss

    slide = trained(model, ds_config({"window": 2}, clip=CLIP), data, loss_of=loss_of)
    assert blocks(seen[0])
    plain = plain_training(reference.train(), data, CLIP)
    assert plain.norms[0] > 0.0
    assert slide.norms == plain.norms
    assert differences(slide, plain) == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in FAMILIES]
)
def test_family(name: str) -> None:
    check(name, lambda count: (count == 0) == (name in WITHOUT_BLOCKS))


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_model_without_layer_list(name: str) -> None:
    check(name, lambda count: count == 0)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert", "opt", "vit", "qwen3-vl"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_family_with_checkpointing(name: str, reentrant: bool) -> None:
    check(name, lambda count: count > 0, {"use_reentrant": reentrant})
