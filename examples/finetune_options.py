"""The command line of `finetune.py` and what it makes of the DeepSpeed JSON."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from finetune_models import model_config


def parse_arguments(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a JSON that cannot be read or lacks a batch size ends the program here with one sentence."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        default="tiny",
        help="preset (tiny, gpt2, qwen2.5-0.5b ... 14b, llama3-8b) or a local Hugging Face directory",
    )
    model.add_argument(
        "--zero-init", action="store_true", help="build under deepspeed.zero.Init instead of whole on the device"
    )
    model.add_argument(
        "--gradient-checkpointing",
        "--gradient_checkpointing",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="recompute activations in backward",
    )
    model.add_argument("--reentrant", action="store_true", help="use the reentrant form of gradient checkpointing")

    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        help='a text file, or "random" for tokens from a fixed generator; default: the help topics of Python itself',
    )
    data.add_argument("--seq", type=int, default=256, help="tokens in a sequence")
    data.add_argument(
        "--batch",
        type=int,
        help="sequences a rank and micro-batch; overrides train_micro_batch_size_per_gpu of the JSON",
    )
    data.add_argument(
        "--accumulation", type=int, help="micro-batches a step; overrides gradient_accumulation_steps of the JSON"
    )
    data.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data and dropout")

    run = parser.add_argument_group("run")
    run.add_argument(
        "--steps", type=int, default=100, help="optimizer steps of the whole run, those before --load included"
    )
    run.add_argument(
        "--eval-every",
        type=int,
        default=0,
        metavar="STEPS",
        help="evaluate on held-out data every so many steps; 0: never",
    )
    run.add_argument("--eval-batches", type=int, default=4, help="batches of one evaluation")
    run.add_argument("--log", type=Path, metavar="FILE.jsonl", help="one JSON line a step")
    run.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint at the end")
    run.add_argument("--load", type=Path, metavar="DIR", help="resume from the latest checkpoint there")
    run.add_argument(
        "--deterministic",
        action="store_true",
        help="only deterministic GPU kernels: the same bits in every run, somewhat slower",
    )
    run.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help="set by the launcher")
    deepspeed.add_config_arguments(parser)

    args = parser.parse_args(arguments)
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config is missing: give a DeepSpeed JSON, for instance configs/slide_cpu.json")
    try:
        args.config = read_config(Path(args.deepspeed_config), args.batch, args.accumulation)
        args.model_config = model_config(args.model)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def read_config(path: Path, batch: int | None, accumulation: int | None) -> dict[str, Any]:
    """The DeepSpeed JSON with the batch sizes of the command line in it. Raises OSError or ValueError."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if batch is not None:
        config["train_micro_batch_size_per_gpu"] = batch
    if accumulation is not None:
        config["gradient_accumulation_steps"] = accumulation
    if batch is not None or accumulation is not None:
        config.pop("train_batch_size", None)  # the product of the others; DeepSpeed refuses one that contradicts them
    config.setdefault("gradient_accumulation_steps", 1)
    if not isinstance(config.get("train_micro_batch_size_per_gpu"), int):
        raise ValueError(f"{path} sets no train_micro_batch_size_per_gpu: set it there or give --batch")
    return config


def compute_dtype(config: dict[str, Any]) -> torch.dtype:
    """What the JSON trains in."""
    if config.get("bf16", {}).get("enabled"):
        return torch.bfloat16
    return torch.float16 if config.get("fp16", {}).get("enabled") else torch.float32
