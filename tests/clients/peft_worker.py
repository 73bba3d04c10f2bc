"""Trains with PEFT and Hugging Face's Trainer in their documented order, on stock ZeRO-3 and on DS-Slide.

    python peft_worker.py FOLDER

The arguments with the DeepSpeed config come first, so that the bf16 weights are made under `zero.Init`; then the
adapters, in PEFT's default fp32. See `serving` for how runs are asked for. Not a test module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from serving import serve
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ds_slide  # noqa: F401 - switches the "ds_slide" key on where the package is not installed

TARGETS = ["q_proj", "v_proj", "down_proj"]
STEPS, SAVED = 6, 3
VOCABULARY = 256
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    # (the adapters' configuration, arguments of `train`)
    "lora": (LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"), {}),
    "dora": (LoraConfig(r=4, use_dora=True, target_modules=TARGETS, task_type="CAUSAL_LM"), {}),
    "ia3": (IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"), {"lr": 1e-2}),
    "modules_to_save": (
        LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM"),
        {},
    ),
    "bf16_adapters": (LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"), {"cast": False}),
    "autocast": (LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"), {"autocast": True}),
    "checkpointing": (LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"), {"checkpointing": True}),
}


def deepspeed_config(slide: bool) -> dict[str, Any]:
    """That of Hugging Face's documentation, with everything "auto" that may be."""
    auto = "auto"
    config: dict[str, Any] = {
        "bf16": {"enabled": auto},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), auto)},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": auto,
            "stage3_prefetch_bucket_size": auto,
            "stage3_param_persistence_threshold": auto,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), auto),
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), auto),
    }
    return config | {"ds_slide": {"enabled": True}} if slide else config


def save_base(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "base")


def train(
    folder: Path,
    out: Path,
    adapters: Any,
    *,
    slide: bool,
    resume: Path | None = None,
    lr: float = 2e-4,
    cast: bool = True,
    checkpointing: bool = False,
    autocast: bool = False,
) -> dict[str, Any]:
    config = deepspeed_config(slide)
    if autocast:
        del config["bf16"]
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    arguments = TrainingArguments(
        output_dir=str(out),
        deepspeed=config,
        bf16=not autocast,
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing,
        max_steps=STEPS,
        save_steps=SAVED,
        logging_steps=1,
        learning_rate=lr,
        seed=3,
        report_to=[],
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    torch.manual_seed(1)
    model = get_peft_model(model, adapters, autocast_adapter_dtype=cast)
    if checkpointing:
        model.enable_input_require_grads()
    tokens = torch.randint(0, VOCABULARY, (24, 16), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    before = _trainable(model)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    seen = {
        "engine": type(trainer.model_wrapped.optimizer).__name__,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry],
        "before": before,
        "after": _trainable(model),
    }
    trainer.save_model(str(out / "final"))
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        merged = model.merge_and_unload()
    with deepspeed.zero.GatheredParameters(list(merged.parameters())):
        seen["merged"] = {name: parameter.detach().clone() for name, parameter in merged.named_parameters()}
    return seen


def _trainable(model: Any) -> dict[str, torch.Tensor]:
    chosen = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with deepspeed.zero.GatheredParameters([p for p in chosen.values() if hasattr(p, "ds_id")]):
        return {name: parameter.detach().clone() for name, parameter in chosen.items()}


def merge_without_deepspeed(folder: Path, out: Path) -> dict[str, Any]:
    """The adapters that were saved, merged into the weights that they were trained for."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    merged = PeftModel.from_pretrained(base, out / "final").merge_and_unload()
    return {"merged": {name: parameter.detach().clone() for name, parameter in merged.named_parameters()}}


def run(folder: Path, case: str, which: str) -> dict[str, Any]:
    """`which`: the engine, "stock" or "slide"; or what follows on a run of that: "resumed" from its checkpoint, or its
    adapters merged "offline"."""
    if not (folder / "base").exists():
        save_base(folder)
    adapters, arguments = CASES[case]
    if which == "offline":
        return merge_without_deepspeed(folder, folder / f"{case}.slide")
    if which == "resumed":
        arguments = {**arguments, "resume": folder / f"{case}.slide" / f"checkpoint-{SAVED}"}
    return train(folder, folder / f"{case}.{which}", adapters, slide=which != "stock", **arguments)


if __name__ == "__main__":
    serve(run)
