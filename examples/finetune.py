"""Fine-tune a causal language model with DeepSpeed ZeRO-3: one script for users, tests and benchmarks.

    deepspeed --num_gpus 1 examples/finetune.py --deepspeed_config configs/slide_bf16.json \\
        --model qwen2.5-3b --batch 8 --seq 2048 --gradient-checkpointing

Nothing here knows DS-Slide: the key "ds_slide" of the JSON decides, and without it the same command runs stock
DeepSpeed. The optimizer, its schedule, precision and clipping come from the JSON; `--batch` and `--accumulation`
override its batch sizes. The only trace is `slide_stats`, read for log and report when the optimizer offers it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from finetune_data import DOCUMENT_END, Batches, Shape, encode_bytes, load_batches, seed_of
from finetune_models import build_model, is_local_model, num_parameters
from finetune_options import compute_dtype, parse_arguments
from finetune_report import Progress, StepRecord, report

# DeepSpeed 0.19 calls collectives by names that torch 2.13 deprecates: a warning for each would bury the progress.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def start_distributed(local_rank: int) -> tuple[torch.device, int, int]:
    """Join the process group. Returns device, rank and world size. Without a launcher this is a group of one."""
    if "RANK" not in os.environ:
        # Port 0: any free one. Nobody else needs to know it.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    accelerator = get_accelerator()
    accelerator.set_device(local_rank)
    deepspeed.init_distributed()
    return torch.device(accelerator.device_name(local_rank)), deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()


def tokenizer_of(name: str) -> tuple[Callable[[str], list[int]], int]:
    """How text becomes tokens, and the token that ends a document: the tokenizer of a local model, else plain bytes."""
    if is_local_model(name) and (Path(name) / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer in {name} has no end-of-sequence token, which separates documents here")
        return lambda text: tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id
    return encode_bytes, DOCUMENT_END


def open_data(args: argparse.Namespace, shape: Shape) -> Batches:
    """The batches of this rank; ends the program with one sentence when `--data` does not do."""
    try:
        encode, document_end = tokenizer_of(args.model)
        vocabulary = args.model_config.get_text_config().vocab_size
        return load_batches(
            args.data, shape, vocabulary=vocabulary, encode=encode, document_end=document_end, seed=args.seed
        )
    except (OSError, ValueError) as error:
        sys.exit(f"finetune.py: {error}")


def mean_over_ranks(value: torch.Tensor, world_size: int) -> float:
    """One number for all ranks; the only wait for the device in a step."""
    value = value.float()
    if world_size > 1:
        deepspeed.comm.all_reduce(value)
    return value.item() / world_size


def train_step(engine: deepspeed.DeepSpeedEngine, batches: Batches, step: int, accumulation: int) -> torch.Tensor:
    """Forward, backward and update over one step's micro-batches. Returns their mean loss, a scalar on the device."""
    total = torch.zeros((), device=engine.device)
    for micro in range(accumulation):
        tokens = batches.train(step * accumulation + micro).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    return total / accumulation


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, batches: Batches, num_batches: int) -> torch.Tensor:
    """Mean loss over held-out batches, a scalar on the device."""
    engine.eval()
    total = torch.zeros((), device=engine.device)
    for position in range(num_batches):
        tokens = batches.held_out(position).to(engine.device)
        total += engine(input_ids=tokens, labels=tokens).loss
    engine.train()
    return total / num_batches


def resume(engine: deepspeed.DeepSpeedEngine, directory: Path, data: dict[str, Any]) -> int:
    """Load the latest checkpoint and return the step to go on with; ends the program when the data would not go on."""
    path, state = engine.load_checkpoint(str(directory))
    if path is None:
        sys.exit(f"finetune.py: --load {directory} holds no DeepSpeed checkpoint (no file named 'latest' there)")
    changed = changes(state["data"], data)
    if changed:
        sys.exit(f"finetune.py: --load {directory} was saved with other data settings ({changed}): give the same again")
    return int(state["step"])


def changes(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs between two sets of settings, as text; empty when nothing does."""
    return ", ".join(f"{name} {saved[name]!r} -> {value!r}" for name, value in now.items() if saved[name] != value)


def train(
    engine: deepspeed.DeepSpeedEngine, batches: Batches, first_step: int, args: argparse.Namespace
) -> list[StepRecord]:
    """Run the steps from `first_step` to `--steps`, showing and logging each."""
    rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    accumulation = engine.gradient_accumulation_steps()
    tokens_per_step = engine.train_batch_size() * args.seq
    slide_stats = getattr(engine.optimizer, "slide_stats", dict)
    engine.train()
    with Progress(first_step=first_step, steps=args.steps, log=args.log, visible=rank == 0) as progress:
        started = time.perf_counter()
        for step in range(first_step, args.steps):
            # Dropout depends on the step alone, so that a resumed run needs no generator state.
            torch.manual_seed(seed_of(args.seed, step, rank))
            lr = float(engine.get_lr()[0])
            loss = mean_over_ranks(train_step(engine, batches, step, accumulation), world_size)
            ended = time.perf_counter()
            eval_loss = None
            if args.eval_every and (step + 1) % args.eval_every == 0:
                eval_loss = mean_over_ranks(evaluate(engine, batches, args.eval_batches), world_size)
            grad_norm = engine.get_global_grad_norm()
            progress.add(
                StepRecord(
                    step=step + 1,
                    loss=loss,
                    grad_norm=None if grad_norm is None else float(grad_norm),
                    lr=lr,
                    tokens_per_s=tokens_per_step / (ended - started),
                    step_s=ended - started,
                    slide=slide_stats(),
                    eval_loss=eval_loss,
                )
            )
            # Evaluation is not part of a step; everything else, logging included, is.
            started = time.perf_counter() if eval_loss is not None else ended
    return progress.records


def main() -> None:
    args = parse_arguments(__doc__)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device, rank, world_size = start_distributed(args.local_rank)
    accelerator = get_accelerator()
    batch, accumulation = args.config["train_micro_batch_size_per_gpu"], args.config["gradient_accumulation_steps"]

    batches = open_data(args, Shape(batch, args.seq, rank, world_size))
    model = build_model(
        args.model,
        dtype=compute_dtype(args.config),
        device=device,
        seed=args.seed,
        zero_config=args.config if args.zero_init else None,
    )
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": args.reentrant})
    parameters = num_parameters(model)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.config)
    # What the order and content of the batches follow from; a checkpoint goes on with the same only.
    data = {
        "source": args.data,
        "seq": args.seq,
        "batch": batch,
        "accumulation": accumulation,
        "seed": args.seed,
        "ranks": world_size,
    }
    first_step = resume(engine, args.load, data) if args.load else 0
    accelerator.reset_peak_memory_stats()
    records = train(engine, batches, first_step, args)
    if args.save:
        engine.save_checkpoint(str(args.save), client_state={"step": max(first_step, args.steps), "data": data})
    if rank == 0:
        # The CPU accelerator has no memory of its own: its peak would be the process's once more.
        gpu_peak = accelerator.max_memory_allocated() if device.type != "cpu" else None
        name = "DS-Slide" if hasattr(engine.optimizer, "slide_stats") else "stock DeepSpeed"
        summary = report(
            records,
            engine=name,
            parameters=parameters,
            world_size=world_size,
            gpu_peak_bytes=gpu_peak,
            weight_bytes=compute_dtype(args.config).itemsize,
        )
        print(summary, flush=True)
    engine.destroy()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
