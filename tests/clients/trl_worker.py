"""Trains with TRL's trainers, as its documentation does it, on stock ZeRO-3 and on DS-Slide.

    python trl_worker.py FOLDER

What runs are asked for, "stock" or "slide", is the only difference between them (see `serving`). Each leaves what the
trainer logged, and the final weights. Not a test module.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import deepspeed
import tiny
import torch
from peft import LoraConfig
from serving import serve
from trainer_json import trainer_json
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

STEPS = 4
BF16 = {"dtype": "bfloat16"}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")


def ds_config(run: str) -> dict[str, Any]:
    return trainer_json(None if run == "stock" else {"window": 3})


def under_autocast(run: str) -> dict[str, Any]:
    """For a model in fp32."""
    return {**ds_config(run), "bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


def common(run: str, **others: Any) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "bf16": True,
        "use_cpu": True,
        "deepspeed": ds_config(run),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
        **others,
    }


def sft(run: str, data: Any, model: Any = None, peft: Any = None, **options: Any) -> SFTTrainer:
    return SFTTrainer(
        model=model or tiny.causal_model(),
        args=SFTConfig(**common(run, max_length=64, **options)),
        train_dataset=data,
        processing_class=tiny.tokenizer(),
        peft_config=peft,
    )


def on_disk(model: Any) -> str:
    """A model's folder: a reference model is loaded from where the model was, under deepspeed.zero.Init."""
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    return folder


def dpo(run: str, peft: Any = None, **options: Any) -> DPOTrainer:
    return DPOTrainer(
        model=on_disk(tiny.causal_model()),
        args=DPOConfig(**common(run, max_length=64, model_init_kwargs=BF16, **options)),
        train_dataset=tiny.preferences(32),
        processing_class=tiny.tokenizer(),
        peft_config=peft,
    )


def vowels(completions: list[Any], **_: Any) -> list[float]:
    """A reward that tells completions of the same prompt apart."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter in "aeiou" for letter in text) - 0.01 * len(text) for text in texts]


def grpo(run: str, **options: Any) -> GRPOTrainer:
    arguments = common(
        run,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=8,
        model_init_kwargs=BF16,
        **options,
    )
    return GRPOTrainer(
        model=on_disk(tiny.causal_model()),
        reward_funcs=vowels,
        args=GRPOConfig(**arguments),
        train_dataset=tiny.prompts(32),
        processing_class=tiny.tokenizer(),
    )


def reward(run: str) -> RewardTrainer:
    return RewardTrainer(
        model=tiny.reward_model(),
        args=RewardConfig(**common(run, max_length=64)),
        train_dataset=tiny.preferences(32),
        processing_class=tiny.tokenizer(),
    )


CASES: dict[str, Callable[[str], Any]] = {
    "sft": lambda run: sft(run, tiny.texts(32)),
    "sft-tied": lambda run: sft(run, tiny.texts(32), model=tiny.causal_model(tie=True)),
    "sft-without-checkpointing": lambda run: sft(run, tiny.texts(32), gradient_checkpointing=False),
    "sft-re-entrant": lambda run: sft(run, tiny.texts(32), gradient_checkpointing_kwargs={"use_reentrant": True}),
    "sft-assistant-only": lambda run: sft(run, tiny.conversations(32), assistant_only_loss=True),
    "sft-packing": lambda run: sft(run, tiny.texts(48), packing=True),
    "sft-ranks": lambda run: sft(run, tiny.texts(64)),
    "sft-autocast": lambda run: sft(
        run, tiny.texts(32), model=tiny.causal_model().float(), bf16=False, deepspeed=under_autocast(run)
    ),
    "sft-lora": lambda run: sft(run, tiny.texts(32), peft=LORA),
    "dpo": dpo,
    "dpo-lora": lambda run: dpo(run, peft=LORA),
    "grpo": lambda run: grpo(run, beta=0.0),
    "grpo-streamed": lambda run: grpo(run, beta=0.0, ds3_gather_for_generation=False),
    "grpo-beta": lambda run: grpo(run, beta=0.1),
    "grpo-beta-streamed": lambda run: grpo(run, beta=0.1, ds3_gather_for_generation=False),
    "reward": reward,
}


class Before(TrainerCallback):
    """Keeps the weights of the first step."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def on_step_begin(self, _args: Any, _state: Any, _control: Any, model: torch.nn.Module, **_: Any) -> None:
        self.weights = self.weights or weights_of(model)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {
            name.removeprefix("module."): parameter.detach().clone() for name, parameter in model.named_parameters()
        }


def train(case: str, run: str) -> dict[str, Any]:
    trainer, before = CASES[case](run), Before()
    trainer.add_callback(before)
    trainer.train()
    return {
        "optimizer": type(trainer.model_wrapped.optimizer).__name__,
        "ranks": trainer.accelerator.num_processes,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        "before": before.weights,
        "weights": weights_of(trainer.model_wrapped.module),
    }


if __name__ == "__main__":
    serve(lambda _folder, case, run: train(case, run))
