"""Trains with PEFT and Hugging Face's Trainer in their documented order, on stock ZeRO-3 and on DS-Slide.

    python peft_worker.py FOLDER

The arguments with the DeepSpeed config come first, so that the bf16 weights are made under `zero.Init`; then the
adapters, in PEFT's default fp32. Every run is a fork, because accelerate keeps one configuration for a process and the
imports take longer than a run. Leaves FOLDER/CASE.RUN.pt and FOLDER/CASE.RUN.log. Not a test module.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(ACCELERATE_USE_DEEPSPEED="true", MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")

import deepspeed
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
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
) -> dict[str, Any]:
    arguments = TrainingArguments(
        output_dir=str(out),
        deepspeed=deepspeed_config(slide),
        bf16=True,
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


def in_a_fork(folder: Path, name: str, run: Callable[[], dict[str, Any]]) -> None:
    """Leaves FOLDER/NAME.pt with what `run` returns."""
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{name} has failed: {(folder / f'{name}.log').read_text(errors='replace')[-6000:]}")
        return
    code = 1
    try:
        log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        store = torch.distributed.FileStore(str(folder / f"{name}.store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        torch.save(run(), folder / f"{name}.pt")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    save_base(folder)
    for case, (adapters, arguments) in CASES.items():
        for run in ("stock", "slide"):
            out = folder / f"{case}.{run}"

            def work(out: Path = out, run: str = run, adapters: Any = adapters, arguments: Any = arguments) -> Any:
                return train(folder, out, adapters, slide=run == "slide", **arguments)

            in_a_fork(folder, f"{case}.{run}", work)
    out, adapters = folder / "lora.slide", CASES["lora"][0]
    in_a_fork(
        folder,
        "lora.resumed",
        lambda: train(folder, folder / "resumed", adapters, slide=True, resume=out / f"checkpoint-{SAVED}"),
    )
    in_a_fork(folder, "lora.offline", lambda: merge_without_deepspeed(folder, out))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
