"""Runs the runs of `runs.py` in one tree, and writes what came out, as hashes of bits, to a file for each rank.

    PYTHONPATH=TREE python worker.py --tree TREE --ranks 1 --out FOLDER [--resume FOLDER] [--only REGEX]

Checkpoints go to FOLDER/checkpoints. With `--resume`, those runs that save load the checkpoint of that folder instead
of training: what is loaded, and one more step, must be what the other tree had.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from runs import ONE_RANK, STEPS, TWO_RANKS, Run, batches
from torch import nn

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="the runs of one tree")
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--ranks", type=int, choices=(1, 2), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()

    import_once(options.tree)
    for rank in range(1, options.ranks):
        if not os.fork():
            run_all(options, rank)
            sys.exit()
    run_all(options, 0)
    for _ in range(1, options.ranks):
        if os.wait()[1]:
            sys.exit("another rank has failed")


def import_once(tree: Path) -> None:
    """What takes seconds, before the process is forked."""
    import cpuinfo

    # DeepSpeed asks which CPU it has at every engine, in a process of its own that takes a second.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
    import deepspeed.utils
    from deepspeed.accelerator import get_accelerator
    from transformers import LlamaForCausalLM  # noqa: F401

    import ds_slide

    if not Path(ds_slide.__file__).is_relative_to(tree):
        sys.exit(f"ds_slide was imported from {ds_slide.__file__} instead of {tree}")
    deepspeed.utils.logger.setLevel("ERROR")
    get_accelerator().is_fp16_supported = lambda: True  # slow on a CPU, but it works


def run_all(options: argparse.Namespace, rank: int) -> None:
    import deepspeed

    os.environ.update(LOCAL_RANK=str(rank), LOCAL_SIZE=str(options.ranks))
    torch.set_num_threads(1)
    name = f"{'resume' if options.resume else 'train'}-{options.ranks}"
    store = torch.distributed.FileStore(str(options.out / f"store-{name}"), options.ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    deepspeed.init_distributed("gloo")
    disk = options.out / "disk"
    disk.mkdir(exist_ok=True)
    records = {}
    for title, run in (ONE_RANK if options.ranks == 1 else TWO_RANKS).items():
        if re.search(options.only, title) and (run.saves or not options.resume):
            print(title, flush=True)
            records[title] = recorded(title, run, options, rank, disk)
    (options.out / f"{name}-{rank}.json").write_text(json.dumps(records))
    torch.distributed.destroy_process_group()


def recorded(title: str, run: Run, options: argparse.Namespace, rank: int, disk: Path) -> Record:
    """What one run gives. Ranks draw weights of their own: rank 0's have to win."""
    import deepspeed

    model = run.model(seed=10 * bool(options.resume) + rank)
    given = {} if run.forwards_only else {"model_parameters": run.parameters(model)}
    engine, *_ = deepspeed.initialize(model=model, config=run.config(disk), **given)
    if not type(engine.optimizer).__name__.startswith("Slide"):
        sys.exit(f"{title}: the engine is a {type(engine.optimizer).__name__}, DS-Slide is not in use")
    tag = re.sub(r"\W+", "-", title)
    try:
        if run.forwards_only:
            return {"logits": forwards(engine, batches(rank, 3)), "weights": states_of(engine.module, trained=False)}
        record: Record = {}
        if options.resume:
            folder = options.resume / "checkpoints"
            if engine.load_checkpoint(str(folder), tag)[0] is None:
                sys.exit(f"{title}: there is no checkpoint {tag} in {folder}")
        else:
            record["trained"] = train(engine, run, rank, 0, STEPS)
        record["saved"] = states_of(engine.module)
        if run.saves:
            if not options.resume:
                engine.save_checkpoint(str(options.out / "checkpoints"), tag)
            record["further"] = train(engine, run, rank, STEPS, 1)
            record["end"] = states_of(engine.module)
        return record
    finally:
        engine.destroy()


def train(engine: Any, run: Run, rank: int, first: int, steps: int) -> Record:
    """Losses of all micro-batches, and of each step the norm, loss scale, skipped steps and learning rates."""
    world = torch.distributed.get_world_size()
    count = steps * run.accumulation
    losses, after = [], []
    for tokens in batches(first * run.accumulation * world + rank * count, count):
        boundary = engine.is_gradient_accumulation_boundary()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
        if boundary:
            norm = float(engine.get_global_grad_norm() or 0.0).hex()
            after.append([norm, engine.optimizer.loss_scale, engine.skipped_steps, engine.get_lr()])
    return {"losses": losses, "steps": after}


def forwards(engine: Any, data: list[torch.Tensor]) -> list[str]:
    engine.eval()
    with torch.no_grad():
        return [bits(engine(input_ids=tokens).logits) for tokens in data]


def states_of(model: nn.Module, *, trained: bool = True) -> dict[str, str]:
    """The bits of every weight as the model reads it and, where it is trained, of master and moments."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    parameters = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        states = {f"{name} weight": bits(parameter) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        if trained and parameter.requires_grad:
            states[f"{name} master"] = bits(safe_get_full_fp32_param(parameter))
            for key in ("exp_avg", "exp_avg_sq"):
                states[f"{name} {key}"] = bits(safe_get_full_optimizer_state(parameter, key))
    return states


def bits(tensor: torch.Tensor) -> str:
    """A hash of data type, shape and bits."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode())
    digest.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
