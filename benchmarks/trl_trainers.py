"""Time TRL's trainers, generation and the publishing of weights, and print the record as one JSON line.

    python3 benchmarks/trl_trainers.py --system slide --case sft --model qwen2.5-1.5b
    python3 benchmarks/trl_trainers.py --system stock --case grpo --model qwen2.5-1.5b --steps 3

The model has random weights and is loaded from its folder by the trainer, under `zero.Init`, as TRL's own scripts do.
`sft` and `sft-lora` train on `--batch` sequences of `--seq` random tokens; `grpo` generates as many completions of
64 tokens, trains on them, and ends with a generation alone. Every case ends with the loop over `GatheredParameters` by
which TRL gives its weights to an inference engine, into bf16 copies on the accelerator.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import step
import torch
from datasets import Dataset
from peft import LoraConfig
from shapes import build_on_accelerator
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.models.utils import unwrap_model_for_generation

# The tokenizer and the Trainer's JSON are those of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "clients"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
import tiny
from trainer_json import trainer_json

WARMUP = 2
COMPLETION = 64
GENERATED = 48


class Clock(TrainerCallback):
    """Seconds of every optimizer step, from the end of the one before."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self._before = device, [], 0.0  # type: ignore[var-annotated]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._before = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        step.synchronize(self.device)
        now = time.perf_counter()
        self.seconds.append(now - self._before)
        self._before = now


def letters(completions: list[Any], **_: Any) -> list[float]:
    """A reward that tells completions of one prompt apart."""
    return [float(sum(letter in "aeiou" for letter in completion[0]["content"])) for completion in completions]


def random_tokens(count: int, length: int, vocabulary: int) -> Dataset:
    tokens = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(1))
    return Dataset.from_list([{"input_ids": row.tolist()} for row in tokens])


def make(case: str, options: argparse.Namespace, folder: str, vocabulary: int, device: torch.device) -> Any:
    common: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": options.batch,
        "max_steps": WARMUP + options.steps,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "bf16": True,
        "use_cpu": device.type == "cpu",
        "deepspeed": trainer_json(options.slide if options.system == "slide" else None),
        "model_init_kwargs": {"dtype": "bfloat16"},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
    }
    if case == "grpo":
        # As many tokens in every step: random weights end a completion anywhere.
        settings = {
            "num_generations": options.batch,
            "max_completion_length": COMPLETION,
            "generation_kwargs": {"min_new_tokens": COMPLETION},
            "beta": 0.0,
        }
        return GRPOTrainer(
            model=folder,
            reward_funcs=letters,
            args=GRPOConfig(**common, **settings),
            train_dataset=tiny.prompts(64),
            processing_class=tiny.tokenizer(),
        )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return SFTTrainer(
        model=folder,
        args=SFTConfig(**common, max_length=options.seq),
        train_dataset=random_tokens(4 * options.batch, options.seq, vocabulary),
        processing_class=tiny.tokenizer(),
        peft_config=lora if case == "sft-lora" else None,
    )


def generation_s(trainer: Any, batch: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of generations of GENERATED tokens for each of `batch` prompts: several gathered, one not."""
    seconds: dict[str, list[float]] = {"warming up": [], "gathered": [], "not gathered": []}
    prompt = {"input_ids": torch.full((batch, 16), 7, device=device)}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    for turn in ("warming up", *["gathered"] * 7, "not gathered"):
        step.synchronize(device)
        begin = time.perf_counter()
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped, trainer.accelerator, gather_deepspeed3_params=turn != "not gathered"
            ) as model,
            torch.no_grad(),
        ):
            model.generate(**prompt, max_new_tokens=GENERATED, min_new_tokens=GENERATED, do_sample=False)
        step.synchronize(device)
        seconds[turn].append(time.perf_counter() - begin)
    return seconds


def publishing(model: torch.nn.Module, device: torch.device) -> dict[str, float]:
    """Bytes and seconds of the loop that copies every parameter out of the engine, the second time."""
    import deepspeed

    copies: dict[str, torch.Tensor] = {}
    seconds = 0.0
    for _ in range(2):
        step.synchronize(device)
        begin = time.perf_counter()
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if name not in copies:
                    copies[name] = torch.empty_like(parameter.data)
                copies[name].copy_(parameter.data)
        step.synchronize(device)
        seconds = time.perf_counter() - begin
    nbytes = sum(copy.nbytes for copy in copies.values())
    return {"bytes": nbytes, "seconds": seconds, "gb_per_s": nbytes / seconds / 1e9}


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    device = step.accelerator_device()
    model = build_on_accelerator(options.model, device, 0)
    vocabulary = model.config.vocab_size
    model.save_pretrained(folder)
    del model
    trainer, clock = make(options.case, options, folder, vocabulary, device), Clock(device)
    trainer.add_callback(clock)
    step.note(f"{options.system}, {options.case}: training")
    trainer.train()
    timed = statistics.median(clock.seconds[WARMUP:])
    record: dict[str, Any] = {
        **{name: vars(options)[name] for name in ("system", "case", "model", "batch", "seq", "slide")},
        "optimizer": type(trainer.model_wrapped.optimizer).__name__,
        "step_s": timed,
        "step_s_all": clock.seconds,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "grad_norms": [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry],
    }
    if options.case == "grpo":
        step.note("generating")
        record["generation_s"] = generation_s(trainer, options.batch, device)
    else:
        record["tokens_per_s"] = options.batch * options.seq / timed
    if device.type == "cuda":
        record["gpu_peak_bytes"] = torch.cuda.max_memory_allocated()
    step.note("publishing")
    record["publishing"] = publishing(trainer.model_wrapped.module, device)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=("slide", "stock"), required=True)
    parser.add_argument("--case", choices=("sft", "sft-lora", "grpo"), required=True)
    parser.add_argument("--model", default="qwen2.5-1.5b", help="preset of examples/finetune_models.py")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--slide", type=json.loads, default={}, help='additions to "ds_slide", as JSON')
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", port)
    with tempfile.TemporaryDirectory() as folder:
        record = measure(options, folder)
    sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
