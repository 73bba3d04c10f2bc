"""One of two ranks over NCCL that trains a small model and does something to itself in the third step.

    RANK=... WORLD_SIZE=2 LOCAL_RANK=... python two_ranks_worker.py FAULT '{"hang_timeout": 20}'

FAULT: nothing, or one of `FAULTS`, done by rank 1; or "reference", for a second engine without an optimizer, whose
forward precedes each one of the training. A rank that comes to its end prints "losses" and a JSON list, "weights" and
a list of their sums, of the second engine "references" and another.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

from harness import batches, ds_config, llama  # noqa: E402

from ds_slide.runtime.core.unit import Update  # noqa: E402

STEPS, FAULT_IN = 4, 2


def kill_in_forward(engine: Any) -> None:
    block = engine.module.model.layers[3]
    block.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def skip_the_norm(_engine: Any) -> None:
    """Leave out the sum of one number over the ranks; those of gradients have more."""
    original = dist.all_reduce

    @functools.wraps(original)
    def all_reduce(values: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if values.numel() > 64 or dist.all_reduce is original:
            return original(values, *arguments, **options)
        dist.all_reduce = original
        # As if the other rank had given the same: otherwise this rank would notice by the digest in the sum.
        return values.mul_(dist.get_world_size())

    dist.all_reduce = all_reduce


def drop_the_end_of_an_update(_engine: Any) -> None:
    original = Update.finish

    def finish(_update: Update, _index: int) -> None:
        Update.finish = original  # type: ignore[method-assign]

    Update.finish = finish  # type: ignore[method-assign]


FAULTS = {"kill": kill_in_forward, "skip": skip_the_norm, "drop": drop_the_end_of_an_update}


def main(fault: str, slide: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    device = torch.device(get_accelerator().current_device_name())
    model = llama()
    engine, *_ = deepspeed.initialize(model=model, config=ds_config(slide), model_parameters=list(model.parameters()))
    reference = None
    if fault == "reference":
        # A model with the weights of the first, so that the losses of the first step are the same.
        reference, *_ = deepspeed.initialize(model=llama(), config=ds_config(slide, optimizer=None))
    losses, references = [], []
    for step in range(STEPS):
        if step == FAULT_IN and rank == 1 and fault in FAULTS:
            FAULTS[fault](engine)
        batch = {name: value.to(device) for name, value in batches(dist.get_world_size(), seed=step)[rank].items()}
        if reference is not None:
            with torch.no_grad():
                references.append(reference(**batch).loss.item())
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if reference is not None:
        print("references", json.dumps(references), flush=True)
        reference.destroy()
    print("losses", json.dumps(losses), flush=True)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        sums = [parameter.double().sum().item() for parameter in model.parameters()]
    print("weights", json.dumps(sums), flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    import ds_slide  # noqa: F401  (for a source tree on the path)

    main(sys.argv[1], json.loads(sys.argv[2]))
