"""One of two ranks (gloo, CPU): runs loops of `LOOPS` and leaves the masters in FOLDER/rank<N>.pt.

    python doubtful_ranks_worker.py FOLDER CASES

CASES: a loop and a clipping each, as JSON.

Each rank gets half of each batch, so that plain torch with the whole batches has the right numbers.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import two_ranks
from loops import Net, Run, inputs, made, run_loop

Shares = Callable[[int], Iterator[torch.Tensor]]
SHARED: dict[str, Any] = {"window": 2}
GATHERED: dict[str, Any] = {"window": 2, "share_weights": False}


def whole(seed: int) -> Iterator[torch.Tensor]:
    """Batches of one process."""
    yield from inputs(4, seed=seed)


def of_rank(rank: int, seed: int) -> Iterator[torch.Tensor]:
    """Its part of the same batches."""
    yield from (x.chunk(two_ranks.RANKS)[rank] for x in whole(seed))


def train(engine: Any, x: torch.Tensor) -> None:
    engine.backward(engine(x))
    engine.step()


def one_rank_alone(shares: Shares, run: Run) -> None:
    """The first rank alone asks for the gradient of inputs, between steps and before the first."""
    engine = run.start(made(Net))
    for x in shares(1):
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            other = x.clone().requires_grad_()
            assert torch.autograd.grad(engine(other), other)[0].any()
        train(engine, x)


def fast_gradient_sign(shares: Shares, run: Run) -> None:
    engine = run.start(made(Net))
    for x in shares(1):
        x = x.clone().requires_grad_()
        engine(x).backward()
        assert x.grad is not None
        engine.zero_grad()
        train(engine, (x + 0.1 * x.grad.sign()).detach())


def part_dropped(shares: Shares, run: Run) -> None:
    """A backward in `eval()`, of which some submodules drop their gradients."""
    engine = run.start(made(Net))
    for x, other in zip(shares(1), shares(2), strict=True):
        engine.eval()
        engine(other).backward()
        engine.module.blocks[1].zero_grad()
        engine.module.blocks[2].up.zero_grad()
        engine.module.inp.zero_grad()
        engine.train()
        train(engine, x)


class Generator(Net):
    """Returns what its blocks make."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.hidden(x)


def judged(shares: Shares, run: Run) -> None:
    """The generator's loss runs through the model of another engine."""
    generator, judge = run.start(made(Generator)), run.start(made(Net, 1))
    for noise, x in zip(shares(1), shares(2), strict=True):
        generator.backward(judge(generator(noise)))
        generator.step()
        judge.zero_grad()
        train(judge, x)


LOOPS: dict[str, tuple[Callable[[Shares, Run], None], dict[str, Any]]] = {
    "one rank alone": (one_rank_alone, SHARED),
    "fast gradient sign": (fast_gradient_sign, SHARED),
    "fast gradient sign, gathered": (fast_gradient_sign, GATHERED),
    "judged": (judged, SHARED),
    "part dropped": (part_dropped, SHARED),
    "part dropped, on the GPU": (part_dropped, {**SHARED, "gpu_states": "100KB"}),
}
CLIPS = (1.0, 0.0)


def main(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder) as seen:
        for name, clip in json.loads(sys.argv[2]):
            loop, slide = LOOPS[name]
            own = functools.partial(loop, functools.partial(of_rank, rank))
            seen[name, clip] = run_loop(own, "slide", clip=clip, slide=slide).masters


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
