"""Mixtures of experts as transformers 5 has them, fused in 3-D parameters: frozen, with adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from adapters import Adapter
from harness import VOCABULARY, to_bf16
from packed import PackedTensor
from torch import nn

EXPERTS, TOP_K, WIDTH, INNER, LAYERS = 8, 2, 64, 32, 3
EXPERT_BYTES = 3 * WIDTH * INNER * 2
"""Bytes of an expert in bf16: gate, up and down."""
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3Moe",
        {"intermediate_size": 128, "moe_intermediate_size": INNER, "head_dim": 16, "num_experts": EXPERTS},
    ),
    "mixtral": ("Mixtral", {"intermediate_size": INNER, "num_local_experts": EXPERTS}),
    # A dense block first; routing weights in fp32, with a bias, and an expert that all tokens share.
    "deepseek": (
        "DeepseekV3",
        {
            "intermediate_size": 128,
            "moe_intermediate_size": INNER,
            "n_routed_experts": EXPERTS,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    # An expert that all tokens share is added in place to the result of the others.
    "qwen2": (
        "Qwen2Moe",
        {
            "intermediate_size": 128,
            "moe_intermediate_size": INNER,
            "shared_expert_intermediate_size": 64,
            "num_experts": EXPERTS,
        },
    ),
    # Experts with biases, which stay in the slot of the block, and with transposed matrices.
    "gpt-oss": ("GptOss", {"intermediate_size": INNER, "num_local_experts": EXPERTS, "head_dim": 16}),
}
TARGETS = ("q_proj", "v_proj", "q_b_proj", "o_proj")


def mixture(shape: str, implementation: str | None = None, checkpoints: Any = None, **options: Any) -> nn.Module:
    """A model in bf16 whose only trained parameters are adapters on attention. `implementation`: of the experts.
    `checkpoints`: the arguments of gradient checkpointing, if any."""
    import transformers

    name, sizes = SHAPES[shape]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(COMMON | sizes | options))
    model = to_bf16(getattr(transformers, f"{name}ForCausalLM")(config))
    if implementation is not None:
        model.set_experts_implementation(implementation)
    model.requires_grad_(False)
    torch.manual_seed(1)
    for layer in model.model.layers:
        for parent in list(layer.modules()):
            for child_name, child in list(parent.named_children()):
                if child_name in TARGETS and isinstance(child, nn.Linear):
                    setattr(parent, child_name, Adapter(child, torch.bfloat16))
    if checkpoints is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoints)
        model.enable_input_require_grads()
    return model.train()


ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted_mixture(
    shape: str,
    implementation: str | None = None,
    checkpoints: Any = None,
    *,
    names: Sequence[str] = ("default",),
    targets: Sequence[str] = ON_EXPERTS,
    **options: Any,
) -> Any:
    """The same with PEFT's adapters on one more projection of attention, and on the experts themselves. `names`: of
    the adapters, of which the first is active."""
    import peft

    model = mixture(shape, implementation, **options)
    torch.manual_seed(3)
    on_attention = ["kv_b_proj" if shape == "deepseek" else "k_proj"]
    settings = peft.LoraConfig(
        r=4, init_lora_weights=False, target_modules=on_attention, target_parameters=list(targets)
    )
    model = peft.get_peft_model(model, settings, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, settings)
    if checkpoints is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoints)
        model.enable_input_require_grads()
    return to_bf16(model).train()


def with_packed_experts(model: Any) -> Any:
    """`model` with its experts in a tensor subclass, which the engine takes apart into a parametrization."""
    for module in model.modules():
        for name in ("gate_up_proj", "down_proj"):
            weight = module._parameters.get(name)
            if weight is not None and weight.dim() == 3:
                module._parameters[name] = nn.Parameter(PackedTensor.of(weight.detach()), requires_grad=False)
    return model


def fetched(engine: Any) -> int:
    """Bytes that went up since the last call."""
    context = engine.optimizer.runtime.parts.context
    context.lanes.h2d.drain()
    moved: int = context.recorder.meters["h2d"].take()[1]
    return moved
