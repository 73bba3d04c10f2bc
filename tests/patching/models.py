"""Tiny models of nine families, batches for them, and what one training step leaves."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, HIDDEN, LAYERS, BATCH, LENGTH = 97, 32, 2, 2, 6

_ROTARY = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_NEOX = {key: value for key, value in _ROTARY.items() if key not in ("num_key_value_heads", "pad_token_id")}
# Every family with the modules that its patched model replaces.
_PER_LAYER = {"norm": 2 * LAYERS + 1, "rope": LAYERS, "mlp": LAYERS, "loss": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "llama": ("Llama", {**_ROTARY, "tie_word_embeddings": False}, _PER_LAYER),
    "qwen2": ("Qwen2", {**_ROTARY, "tie_word_embeddings": True}, _PER_LAYER),
    "qwen3": ("Qwen3", {**_ROTARY, "head_dim": 8}, {**_PER_LAYER, "norm": 4 * LAYERS + 1}),
    "mistral": ("Mistral", {**_ROTARY, "sliding_window": None}, _PER_LAYER),
    "gemma": ("Gemma", {**_ROTARY, "head_dim": 8}, _PER_LAYER),
    "gemma2": (
        "Gemma2",
        {**_ROTARY, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
        {**_PER_LAYER, "norm": 4 * LAYERS + 1},
    ),
    "phi3": ("Phi3", _ROTARY, _PER_LAYER),
    "gpt_neox": ("GPTNeoX", {**_NEOX, "rotary_pct": 0.5}, {"norm": 2 * LAYERS + 1, "rope": LAYERS, "loss": 1}),
    "gpt2": (
        "GPT2",
        {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        {"norm": 2 * LAYERS + 1, "loss": 1},
    ),
}
ALL = ["loss", "norm", "rope", "mlp"]


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> nn.Module:
    """A model in training mode whose norm weights are not all alike."""
    import transformers

    name, sizes, _ = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**sizes, use_cache=False, **options)
    model: nn.Module = getattr(transformers, name + ("LMHeadModel" if name == "GPT2" else "ForCausalLM"))(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model.to(DEVICE, dtype).train()


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tokens with labels of which a few are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[0, :3] = -100
    return {"input_ids": tokens.to(DEVICE), "labels": labels.to(DEVICE)}


def loss_and_gradients(model: nn.Module, **arguments: Any) -> dict[str, torch.Tensor]:
    """Loss and the gradient of every parameter by name, in fp64."""
    model.zero_grad(set_to_none=True)
    loss = model(**(batch() | arguments)).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return {"loss": loss.detach().double(), **{name: gradient.double() for name, gradient in found.items()}}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Norm of the difference against the norm, tensor by tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm().clamp_min(1e-6)
        assert error <= tolerance, f"{name} differs by {float(error):.2e}"


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
