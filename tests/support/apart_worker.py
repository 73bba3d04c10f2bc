"""Two ranks (gloo, CPU) that take themselves for ranks of two machines: each leaves what it saw in FOLDER/rank<N>.pt.

python apart_worker.py FOLDER RANKS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import two_ranks
from differing import Case, Towers, frozen, reference, same_modules, train
from loops import WIDTH, distance, made, running

from ds_slide.errors import SlideError
from ds_slide.runtime.core.ranks import sharing


def another_order(rank: int) -> str:
    """Weights are shared here, so that a graph needs no gather. What is said when rank 1 keeps a graph of a block
    that rank 0 does not have, so that their gradients are averaged in another order. All that is trained is of one
    size: nothing hangs."""
    build = frozen("inp", "project", "head", "vision", "experts")
    with running("slide", 1.0, {"window": 6}) as run:
        engine = run.start(made(build))
        if rank:
            kept = engine.module.layers[2](torch.randn(4, WIDTH, requires_grad=True))
            assert kept.requires_grad
        batch = dict(same_modules(rank, 0))
        batch["x"].requires_grad_()
        engine.backward(engine(**batch))
        try:
            engine.step()
        except SlideError as error:
            return str(error)
    return ""


def main(rank: int, folder: Path) -> None:
    identity = sharing.machine_identity
    sharing.machine_identity = lambda namespace: f"{identity(namespace)} {rank}"
    with two_ranks.as_rank(rank, folder) as seen:
        case = Case(same_modules, steps=2)
        run = train(case, rank)
        expected = reference(case, 2)
        seen["same modules"] = distance(run, expected)
        with running("slide", 1.0, {}) as other:
            engine = other.start(made(Towers))
            seen["has a board"] = engine.optimizer.runtime.parts.announcements is not None
        sharing.machine_identity = identity
        seen["another order"] = another_order(rank)


if __name__ == "__main__":
    two_ranks.fork_world(int(sys.argv[2]), main, Path(sys.argv[1]))
