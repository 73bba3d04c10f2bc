"""Fine-tune a causal language model with DeepSpeed ZeRO-3: one script for users, tests and benchmarks.

    deepspeed --num_gpus 1 examples/finetune.py --deepspeed_config configs/slide_bf16.json --model qwen2.5-3b --batch 8 --seq 2048

Nothing here knows DS-Slide: the key "ds_slide" of the JSON decides, and without it the same command runs stock DeepSpeed. The
optimizer, its schedule, precision and clipping come from the JSON; `--batch` and `--accumulation` override its batch sizes. The
only trace is `slide_stats`, read when the engine's optimizer offers it, for the log and the report.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from finetune_data import DOCUMENT_END, Batches, Shape, encode_bytes, load_batches, seed_of
from finetune_models import build_model, is_local_model, model_config, num_parameters
from finetune_report import Progress, StepRecord, report


# DeepSpeed 0.19 calls collectives by names that torch 2.13 deprecates: a warning for every parameter would bury the progress.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a JSON that cannot be read or lacks a batch size ends the program here with one sentence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="tiny", help="preset (tiny, gpt2, qwen2.5-0.5b ... 14b, llama3-8b) or a local Hugging Face directory")
    model.add_argument("--zero-init", action="store_true", help="build under deepspeed.zero.Init instead of whole on the device")
    model.add_argument(
        "--gradient-checkpointing", "--gradient_checkpointing", action=argparse.BooleanOptionalAction, default=False,
        help="recompute activations in backward",
    )
    model.add_argument("--reentrant", action="store_true", help="use the reentrant form of gradient checkpointing")

    data = parser.add_argument_group("data")
    data.add_argument("--data", help='a text file, or "random" for tokens from a fixed generator; default: the help topics of the Python library')
    data.add_argument("--seq", type=int, default=256, help="tokens in a sequence")
    data.add_argument("--batch", type=int, help="sequences a rank and micro-batch; overrides train_micro_batch_size_per_gpu of the JSON")
    data.add_argument("--accumulation", type=int, help="micro-batches a step; overrides gradient_accumulation_steps of the JSON")
    data.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data and dropout")

    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=int, default=100, help="optimizer steps of the whole run, those before --load included")
    run.add_argument("--eval-every", type=int, default=0, metavar="STEPS", help="evaluate on held-out data every so many steps; 0: never")
    run.add_argument("--eval-batches", type=int, default=4, help="batches of one evaluation")
    run.add_argument("--log", type=Path, metavar="FILE.jsonl", help="one JSON line a step")
    run.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint at the end")
    run.add_argument("--load", type=Path, metavar="DIR", help="resume from the latest checkpoint there")
    run.add_argument("--deterministic", action="store_true", help="only deterministic GPU kernels: the same bits in every run, somewhat slower")
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


def start_distributed(local_rank: int) -> tuple[torch.device, int, int]:
    """Join the process group. Returns device, rank and world size. Works under any launcher and with none (one process)."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
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


def compute_dtype(config: dict[str, Any]) -> torch.dtype:
    """What the JSON trains in."""
    if config.get("bf16", {}).get("enabled"):
        return torch.bfloat16
    return torch.float16 if config.get("fp16", {}).get("enabled") else torch.float32


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
    """Load the latest checkpoint and return the step to go on with. Raises ValueError when the data would not continue."""
    path, state = engine.load_checkpoint(str(directory))
    if path is None:
        raise ValueError(f"--load {directory} holds no DeepSpeed checkpoint (no file named 'latest')")
    changed = [f"{key} {state['data'][key]!r} -> {value!r}" for key, value in data.items() if state["data"][key] != value]
    if changed:
        raise ValueError(f"--load {directory} was saved with other data settings ({', '.join(changed)}): resume with the same")
    return int(state["step"])


def main() -> None:
    args = parse_arguments()
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device, rank, world_size = start_distributed(args.local_rank)
    batch, accumulation = args.config["train_micro_batch_size_per_gpu"], args.config["gradient_accumulation_steps"]

    encode, document_end = tokenizer_of(args.model)
    batches = load_batches(
        args.data,
        Shape(batch, args.seq, rank, world_size),
        vocabulary=args.model_config.get_text_config().vocab_size,
        encode=encode,
        document_end=document_end,
        seed=args.seed,
    )
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
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=trainable, config=args.config)
    slide_stats = getattr(optimizer, "slide_stats", dict)

    data = {"source": args.data, "seq": args.seq, "batch": batch, "accumulation": accumulation, "seed": args.seed, "ranks": world_size}
    first_step = resume(engine, args.load, data) if args.load else 0
    engine.train()
    on_gpu = device.type != "cpu"
    if on_gpu:
        get_accelerator().reset_peak_memory_stats()

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
                    tokens_per_s=batch * accumulation * world_size * args.seq / (ended - started),
                    step_s=ended - started,
                    slide=slide_stats(),
                    eval_loss=eval_loss,
                )
            )
            # Evaluation is not part of a step; everything else, logging included, is.
            started = time.perf_counter() if eval_loss is not None else ended

    if args.save:
        engine.save_checkpoint(str(args.save), client_state={"step": max(first_step, args.steps), "data": data})
    if rank == 0:
        gpu_peak = get_accelerator().max_memory_allocated() if on_gpu else None
        print(report(progress.records, parameters=parameters, world_size=world_size, gpu_peak_bytes=gpu_peak), flush=True)
    engine.destroy()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
