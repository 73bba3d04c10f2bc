"""Trains with Hugging Face's Trainer on stock ZeRO-3 and on DS-Slide, then DS-Slide resumed from its checkpoint; and
evaluates on both without a training.

    python hf_trainer_worker.py FOLDER [RUN ...]

Each run is a fork, because accelerate keeps one configuration for a process. Leaves FOLDER/RUN.pt: what a run logged,
and the weights that its Trainer saved; or FOLDER/RUN.err: the standard error of one that must be refused. Not a test
module.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  (imported here for all forks)
import torch
from safetensors.torch import load_file
from trainer_json import trainer_json
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import ds_slide  # noqa: F401  (for a source tree on the path; an installed package is found by itself)

STEPS, SAVED_AT = 8, 4
RUNS = ("stock", "slide", "resumed")
EVALUATIONS = ("stock-evaluation", "slide-evaluation")
COMPILED = ("stock", "compiled")
"""Runs of test_compiled_trainer; "compiled" is with the key."""
REFUSED = ("json", "adafactor")
"""A value in the JSON, which TrainingArguments refuse, and an optimizer, which Trainer brings to `initialize`."""
VOCABULARY, LENGTH = 256, 32


class Statistics(TrainerCallback):
    """The callback of docs/clients.md: what bounds the steps."""

    def on_log(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        if statistics := optimizer.optimizer.slide_stats():
            state.log_history[-1] |= {name: statistics[name] for name in ("bound_lane", "efficiency")}


def ds_config(run: str) -> dict[str, Any]:
    config = trainer_json(None if run.startswith("stock") else {})
    rates = ("warmup_min_lr", "warmup_max_lr")
    steps = ("total_num_steps", "warmup_num_steps")
    config["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys((*steps, *rates), "auto")}
    if run == "json":
        config["zero_optimization"]["zero_hpz_partition_size"] = 2
    if run == "adafactor":
        del config["optimizer"], config["scheduler"]
    return config


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, num_hidden_layers=3, max_position_embeddings=LENGTH, use_cache=False, **sizes
        )
    )


def trainer_of(run: str, out: Path) -> Trainer:
    arguments = TrainingArguments(
        str(out),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        save_steps=SAVED_AT,
        learning_rate=1e-3,
        warmup_steps=2,
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        deepspeed=ds_config(run),
        logging_steps=1,
        optim="adafactor" if run == "adafactor" else "adamw_torch",
        torch_compile=run == "compiled",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    print(f"{run}: the arguments are made", file=sys.stderr, flush=True)
    tokens = torch.randint(VOCABULARY, (40, LENGTH), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(model=model(), args=arguments, train_dataset=data, eval_dataset=data[:4])


def evaluate(run: str, folder: Path) -> dict[str, Any]:
    """Nothing is trained: the Trainer takes the optimizer out of the JSON."""
    trainer = trainer_of(run, folder / run)
    evaluated = trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(trainer.eval_dataset)
    trainer.save_model(str(folder / run / "final"))
    return {
        "optimizer": type(trainer.model_wrapped.optimizer).__name__,
        "eval_loss": evaluated,
        "logits": torch.tensor(predicted.predictions),
        "weights": load_file(folder / run / "final" / "model.safetensors"),
    }


def train(run: str, folder: Path) -> dict[str, Any]:
    out = folder / ("stock" if run == "stock" else "slide")
    trainer = trainer_of(run, out)
    if run != "stock":
        trainer.add_callback(Statistics())
    trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{SAVED_AT}") if run == "resumed" else None)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(out / "final"))
    return {
        "optimizer": type(trainer.model_wrapped.optimizer).__name__,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        "eval_loss": evaluated,
        "weights": load_file(out / "final" / "model.safetensors"),
    }


def main(folder: Path) -> None:
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(launcher)
    for run in sys.argv[2:] or (*REFUSED, *RUNS, *EVALUATIONS):
        if child := os.fork():
            if (os.waitpid(child, 0)[1] != 0) != (run in REFUSED):
                sys.exit(f"the run {run} has {'not ' if run in REFUSED else ''}failed")
            continue
        if run in REFUSED:
            os.dup2(os.open(folder / f"{run}.err", os.O_WRONLY | os.O_CREAT, 0o600), 2)
        torch.save((evaluate if run in EVALUATIONS else train)(run, folder), folder / f"{run}.pt")
        return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
