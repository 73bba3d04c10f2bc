"""Structure of the model families of the transformers library, built from tiny configs (no download).

Each model also runs once: blocks must be called as modules, in the order of their index. That is what the window
prefetches by, and what the module tree alone cannot prove.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from ds_slide.model.structure import ModelStructure, find_structure

transformers = pytest.importorskip("transformers")

StructureOf = Callable[..., ModelStructure]

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED = SIZES | HEADS | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Family:
    """A model class, its tiny config, and what must be found in it."""

    model: str
    config: str
    options: dict[str, Any]
    lists: tuple[str, ...]
    num_blocks: int = 3
    outer_units: tuple[str, ...] = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")

    def build(self, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**(self.options | options))
        return getattr(transformers, self.model)(config).eval()


def llama_like(name: str, **options: Any) -> Family:
    return Family(f"{name}ForCausalLM", f"{name}Config", GROUPED | options, ("model.layers",))


GPT_NEOX_OUTER = ("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias")
OPT_OUTER = ("embed_tokens.weight", "embed_positions.weight", "final_layer_norm.weight", "final_layer_norm.bias")
GPT2_OUTER = ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")
BERT_OUTER = ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")
VIT_OUTER = ("embeddings.cls_token", "embeddings.position_embeddings")

# Untied unless the library always ties; test_tied_head covers tying.
UNTIED = {"tie_word_embeddings": False}
FAMILIES = {
    "llama": llama_like("Llama", **UNTIED),
    "qwen2": llama_like("Qwen2", **UNTIED),
    "qwen3": llama_like("Qwen3", head_dim=8, **UNTIED),
    "mistral": llama_like("Mistral", head_dim=8, **UNTIED),
    "gemma": llama_like("Gemma", head_dim=8, **UNTIED),
    "gemma2": llama_like("Gemma2", head_dim=8, **UNTIED),
    "gemma3": replace(llama_like("Gemma3", head_dim=8, **UNTIED), config="Gemma3TextConfig"),
    "mixtral": llama_like("Mixtral", num_local_experts=4, **UNTIED),
    "qwen2-moe": llama_like("Qwen2Moe", shared_expert_intermediate_size=32, **EXPERTS, **UNTIED),
    # Dense and MoE layers in one list.
    "qwen3-moe-mixed": llama_like("Qwen3Moe", head_dim=8, mlp_only_layers=[0], **EXPERTS, **UNTIED),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, **UNTIED},
        ("transformer.h",),
        outer_units=(*(f"transformer.{name}" for name in GPT2_OUTER), "lm_head.weight"),
    ),
    "gpt-neox": Family(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        SIZES | HEADS | UNTIED,
        ("gpt_neox.layers",),
        outer_units=(*GPT_NEOX_OUTER, "lm_head.weight"),
    ),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        SIZES | HEADS | {"ffn_dim": 64, "word_embed_proj_dim": 32, **UNTIED},
        ("model.decoder.layers",),
        outer_units=(*(f"model.decoder.{name}" for name in OPT_OUTER), "lm_head.weight"),
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 3}
        | {"decoder_start_token_id": 0},
        ("encoder.block", "decoder.block"),
        num_blocks=6,
        outer_units=("shared.weight", "encoder.final_layer_norm.weight", "decoder.final_layer_norm.weight"),
    ),
    "bert": Family(
        "BertModel",
        "BertConfig",
        SIZES | HEADS,
        ("encoder.layer",),
        outer_units=(
            *(f"embeddings.{name}.weight" for name in BERT_OUTER),
            "embeddings.LayerNorm.bias",
            "pooler.dense.weight",
            "pooler.dense.bias",
        ),
    ),
}


def example_input(model: nn.Module) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    if model.config.is_encoder_decoder:
        return {"input_ids": tokens, "decoder_input_ids": tokens}
    return {"input_ids": tokens}


def calls_of_blocks(model: nn.Module, structure: ModelStructure, inputs: dict[str, torch.Tensor]) -> list[int]:
    """Indices of the blocks in the order in which one forward calls them."""
    calls: list[int] = []
    for block in structure.blocks:
        assert block.module is not None
        block.module.register_forward_pre_hook(lambda _module, _args, index=block.index: calls.append(index))
    with torch.no_grad():
        model(**inputs)
    return calls


def outer_parameters(structure: ModelStructure) -> set[str]:
    return {name for outer_unit in structure.outer_units for name, _ in outer_unit.parameters}


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, structure_of: StructureOf) -> None:
    family = FAMILIES[name]
    model = family.build()
    structure = structure_of(model)
    assert structure.lists == family.lists
    # transformers before 5 names the head of GPT-NeoX otherwise.
    found = {name.replace("embed_out", "lm_head") for name in outer_parameters(structure)}
    assert found == set(family.outer_units)
    assert len(structure.blocks) == family.num_blocks
    assert calls_of_blocks(model, structure, example_input(model)) == list(range(family.num_blocks))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt2", "gpt-neox", "opt"])
def test_tied_head(name: str, structure_of: StructureOf) -> None:
    """The tied matrix is one outer module parameter under the name of the embedding."""
    family = FAMILIES[name]
    structure = structure_of(family.build(tie_word_embeddings=True))
    assert outer_parameters(structure) == set(family.outer_units[:-1])
    assert len(structure.blocks) == family.num_blocks


def test_vit(structure_of: StructureOf) -> None:
    options = SIZES | {"num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    model = transformers.ViTModel(transformers.ViTConfig(**options)).eval()
    structure = structure_of(model)
    (path,) = structure.lists
    assert isinstance(model.get_submodule(path), nn.ModuleList)
    assert len(structure.blocks) == 3
    assert set(VIT_OUTER) < outer_parameters(structure)
    assert calls_of_blocks(model, structure, {"pixel_values": torch.zeros(2, 3, 16, 16)}) == [0, 1, 2]


def test_albert_repeats_one_layer_and_is_one_outer_module(structure_of: StructureOf) -> None:
    model = transformers.AlbertModel(transformers.AlbertConfig(embedding_size=16, **SIZES, **HEADS))
    structure = structure_of(model)
    assert (structure.lists, structure.blocks) == ((), ())
    assert [outer_unit.name for outer_unit in structure.outer_units] == ["outer"]


def test_moe_blocks_hold_their_experts(structure_of: StructureOf) -> None:
    structure = structure_of(FAMILIES["mixtral"].build())
    for block in structure.blocks:
        expert_numel = sum(parameter.numel() for name, parameter in block.parameters if ".experts." in name)
        assert expert_numel == 4 * 3 * 32 * 64


class LoraLinear(nn.Module):
    """The shape that PEFT gives an adapted layer."""

    def __init__(self, base_layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class PeftLikeModel(nn.Module):
    """base_model.model is the original model, frozen, with adapters in its linear layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.config = model.config
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)
        self.base_model = nn.Module()
        self.base_model.model = model

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.base_model.model(**inputs)


def test_peft_like_wrapper(structure_of: StructureOf) -> None:
    model = PeftLikeModel(FAMILIES["llama"].build())
    structure = structure_of(model)
    assert structure.lists == ("base_model.model.model.layers",)
    for block in structure.blocks:
        trainable = [name for name, parameter in block.parameters if parameter.requires_grad]
        prefix = f"{block.name}.self_attn.q_proj.lora_"
        assert trainable == [f"{prefix}A.default.weight", f"{prefix}B.default.weight"]
    assert calls_of_blocks(model, structure, example_input(model)) == [0, 1, 2]


def test_real_sizes_keep_the_vocabulary_out_of_the_window() -> None:
    """The shape of a 0.5 B model: one tied matrix of 136 M elements beside blocks of 15 M."""
    config = transformers.Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    structure = find_structure(model)
    assert [(outer_unit.name, outer_unit.numel) for outer_unit in structure.outer_units] == [
        ("outer:model.embed_tokens", 151936 * 896),
        ("outer", 896),
    ]
    assert {block.numel for block in structure.blocks} == {14_912_384}
    assert len(structure.blocks) == 24
