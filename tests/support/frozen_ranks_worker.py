"""One of two ranks (gloo, CPU) that freeze and unfreeze, for test_frozen_ranks.py: leaves what it saw in rank<N>.pt.

python frozen_ranks_worker.py FOLDER CASES

CASES: a loop, a name of `KEYS` and a clipping each, as JSON.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import two_ranks
from loops import Net, Run, inputs, made, run_loop

from ds_slide.errors import SlideError

WIDTH = 33  # each parameter has an odd number of elements, so that the second rank's partitions end in padding
STEPS = 9
KEYS: dict[str, dict[str, Any]] = {
    "shared": {"window": 2},
    "gathered": {"window": 2, "share_weights": False},
    "on the GPU": {"window": 2, "share_weights": False, "gpu_states": 300_000},
    "ahead": {"window": 2, "speculate": True},
}


def batches_of(rank: int) -> list[torch.Tensor]:
    return inputs(STEPS, width=WIDTH, seed=5 + rank)


def _net() -> Net:
    return Net(width=WIDTH)


def _train(engine: Any, batches: Iterable[torch.Tensor]) -> None:
    for x in batches:
        engine.backward(engine(x))
        engine.step()


def on_and_off(run: Run, batches: list[torch.Tensor]) -> None:
    """Whole layers, halves of layers and outer modules, with momentum."""
    model = made(_net)
    engine = run.start(model)
    for number, x in enumerate(batches):
        for index, block in enumerate(model.blocks):
            block.requires_grad_((index + number // 3) % 2 == 0)
            block.norm.requires_grad_(number % 2 == 0)
        model.inp.requires_grad_(number not in (3, 4))
        _train(engine, [x])


def unfrozen(run: Run, batches: list[torch.Tensor]) -> None:
    """Biases and the last block first, then a matrix in the middle of each, then all."""
    model = made(_net)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith("blocks.3"))
    engine = run.start(model)
    _train(engine, batches[:3])
    for block in model.blocks:
        block.up.weight.requires_grad_(True)
    _train(engine, batches[3:6])
    model.requires_grad_(True)
    _train(engine, batches[6:])


LOOPS: dict[str, Callable[[Run, list[torch.Tensor]], None]] = {"on and off": on_and_off, "unfrozen": unfrozen}


def different_flags(run: Run, rank: int) -> None:
    model = made(_net)
    engine = run.start(model)
    batches = batches_of(rank)
    _train(engine, batches[:1])
    model.blocks[rank].requires_grad_(False)
    _train(engine, batches[1:4])


def main(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder) as seen:
        for name, keys, clip in json.loads(sys.argv[2]):
            own = functools.partial(LOOPS[name], batches=batches_of(rank))
            seen[name, keys, clip] = run_loop(own, "slide", clip=clip, slide=KEYS[keys]).masters
        for clip in (1.0, 0.0):
            try:
                run_loop(functools.partial(different_flags, rank=rank), "slide", clip=clip)
            except SlideError as error:
                seen["different", clip] = str(error)


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
