"""Two ranks (gloo, CPU), of which rank 0 does what rank 1 does not: each leaves what it saw in FOLDER/rank<N>.pt.

python alone_worker.py FOLDER RANKS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import two_ranks
from differing import Towers, mixture
from loops import made, running

from ds_slide.errors import SlideError

STEPS = 3
Masters = dict[str, torch.Tensor]


def train(rank: int, before_each_step: Callable[[Any, int], None]) -> Masters:
    """`before_each_step`: on rank 0."""
    with running("slide", 1.0, {"window": 2}) as run:
        engine = run.start(made(Towers))
        for number in range(STEPS):
            if not rank:
                before_each_step(engine, number)
            engine.backward(engine(**mixture(rank, number)))
            engine.step()
        run._read_masters()
    return run.masters[0]


def evaluate(engine: Any, number: int) -> None:
    with torch.no_grad():
        engine(**mixture(7, number))


def differentiate(engine: Any, number: int) -> None:
    batch = dict(mixture(7, number))
    batch["x"].requires_grad_()
    (gradient,) = torch.autograd.grad(engine(**batch), batch["x"])
    assert gradient.any()


def two_losses(rank: int, *, apart: bool) -> Masters:
    """Rank 0 has two losses a step, rank 1 one."""
    with running("slide", 1.0, {"window": 2}) as run:
        engine = run.start(made(Towers))
        for number in range(STEPS):
            losses = [engine(**mixture(rank, number + 10 * more)) for more in range(1 if rank else 2)]
            for loss in losses if apart else [torch.stack(losses).sum()]:
                engine.backward(loss)
            engine.step()
        run._read_masters()
    return run.masters[0]


def gathered(rank: int) -> tuple[str, float]:
    """The sentence, and the seconds that it took."""
    with running("slide", 1.0, {"window": 2, "share_weights": False}) as run:
        engine = run.start(made(Towers))
        x = torch.randn(4, 32)
        began = time.monotonic()
        try:
            engine(x=x, image=None if rank else x, keep=(True,) * 4, expert=0)
        except SlideError as error:
            return str(error), time.monotonic() - began
    return "", 0.0


def main(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder) as seen:
        seen["nothing"] = train(rank, lambda _engine, _number: None)
        seen["evaluation"] = train(rank, evaluate)
        seen["gradients of inputs"] = train(rank, differentiate)
        seen["both losses in one"] = two_losses(rank, apart=False)
        seen["one more loss"] = two_losses(rank, apart=True)
        seen["gathered"], seen["seconds until the sentence"] = gathered(rank)


if __name__ == "__main__":
    two_ranks.fork_world(int(sys.argv[2]), main, Path(sys.argv[1]))
