"""The longest sequence that one GPU trains, or several that divide it by DeepSpeed's Ulysses, and tokens a second.

    deepspeed --num_gpus 1 benchmarks/sequences.py --values 65536 73728 81920 --gib 40 --out out/longest.jsonl
    deepspeed --num_gpus 2 benchmarks/sequences.py --values 131072 147456 --gib 40 --out out/longest.jsonl
    deepspeed --num_gpus 2 benchmarks/sequences.py --system stock --values 65536 --steps 3 --out out/longest.jsonl

One engine trains one step (or `--steps`) of each length, in the order given, until one fails: an engine that has run
out of memory is not used again. All ranks share each sequence, as docs/hosts.md shows, with SDPA. A line is written for
each length. The gradient is that of the mean loss over all tokens of the sequence.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import memory
import step
import torch
import torch.distributed as dist
import torch.distributed.nn
from settings import SYSTEMS, Setting
from torch import Tensor
from trainers import DeepSpeedTrainer


def divided(length: int, vocabulary: int, mpu: ModuleType | None, device: torch.device) -> dict[str, Tensor]:
    """This rank's piece of a sequence of random tokens."""
    tokens = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(length))
    whole = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(length).repeat(1, 1)}
    if mpu is None:
        return {name: value.to(device) for name, value in whole.items()}
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    group, ranks = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_world_size()
    own = next(UlyssesSPDataLoaderAdapter([whole], mpu.get_sequence_parallel_rank(), group, ranks, device))
    # With labels, a model computes its loss inside, where DS-Slide and others need no logits.
    return {name: value.to(device) for name, value in own.items()} | {"labels": own["shift_labels"].to(device)}


def loss_of(engine: Any, piece: dict[str, Tensor], mpu: ModuleType | None) -> Tensor:
    """The mean loss over the tokens of all ranks."""
    own: Tensor = engine(**piece, use_cache=False).loss
    if mpu is None:
        return own
    group = mpu.get_sequence_parallel_group()
    tokens = (piece["shift_labels"] != -100).sum()
    total: Tensor = torch.distributed.nn.functional.all_reduce(own * tokens, group=group)
    dist.all_reduce(tokens, group=group)
    return total / tokens


def one_step(trainer: DeepSpeedTrainer, piece: dict[str, Tensor], mpu: ModuleType | None) -> tuple[float, float]:
    """Loss, and seconds."""
    begin = time.perf_counter()
    loss = loss_of(trainer.engine, piece, mpu)
    trainer.backward(loss)
    trainer.step()
    value = loss.item()
    step.synchronize(piece["input_ids"].device)
    return value, time.perf_counter() - begin


def register(model: Any, ranks: int) -> ModuleType | None:
    if ranks == 1:
        return None
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    mpu: ModuleType = UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=ranks, micro_batch_size=1
    )
    return mpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=SYSTEMS[:2], default="slide")
    parser.add_argument("--model", default="llama3-8b-8-blocks")
    parser.add_argument("--values", type=int, nargs="+", required=True, help="tokens of a whole sequence")
    parser.add_argument("--steps", type=int, default=1, help="of each length; the last is the one in the line")
    parser.add_argument("--gib", type=float, default=0, help="of the GPU, which torch may allocate; 0: the whole card")
    parser.add_argument("--checkpointing", default="non-reentrant", help="as step.py has it")
    parser.add_argument("--slide", type=json.loads, default={}, help='additions to "ds_slide", as JSON')
    parser.add_argument("--limit", type=float, default=0, help="seconds of a length; then all stacks are printed")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    options = parser.parse_args()
    device = step.begin_rank(options.local_rank)
    ranks = dist.get_world_size()
    if options.gib:
        torch.cuda.set_per_process_memory_fraction(options.gib * 2**30 / torch.cuda.mem_get_info(device)[1], device)
    setting = Setting(options.system, options.model, batch=1, checkpointing=options.checkpointing, slide=options.slide)
    begin = time.perf_counter()
    model = step.prepare_model(setting, device)
    mpu = register(model, ranks)
    trainer = DeepSpeedTrainer(model, setting, "", mpu)
    if dist.get_rank() == 0:
        step.note(f"initialised in {time.perf_counter() - begin:.1f} s")
    asked = {"system": options.system, "model": options.model, "ranks": ranks, "gib": options.gib}
    for length in options.values:
        line = asked | {"checkpointing": options.checkpointing, "seq": length, "slide": options.slide}
        if options.limit:
            faulthandler.dump_traceback_later(options.limit, exit=True)
        memory.restart_gpu_peak()
        try:
            piece = divided(length, model.config.vocab_size, mpu, device)
            losses, seconds = zip(*(one_step(trainer, piece, mpu) for _ in range(options.steps)), strict=True)
        except Exception as error:
            # The other rank waits in a collective: the launcher ends it when this process has ended.
            traceback.print_exc()
            what = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"[:600]
            with options.out.open("a") as file:
                file.write(json.dumps(line | {"status": "failed", "error": what}) + "\n")
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()
        if dist.get_rank() == 0:
            step.note(f"{length} tokens: {seconds[-1]:.3f} s, {length / seconds[-1]:.0f} tokens a second")
            found = {"losses": losses, "step_s_all": seconds, "step_s": seconds[-1], "memory": memory.snapshot()}
            found |= {"tokens_per_s": length / seconds[-1], "slide_stats": trainer.stats()}
            with options.out.open("a") as file:
                file.write(json.dumps(line | {"status": "ok"} | found) + "\n")
        del piece
        if device.type == "cuda":
            torch.cuda.empty_cache()
    trainer.close()


if __name__ == "__main__":
    main()
