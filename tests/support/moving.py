"""States that move between host memory and GPU while a model is trained."""

from __future__ import annotations

import random
from typing import Any

import torch
from harness import Batch, causal_loss

from ds_slide.plan.movable import may_sum, why_fixed
from ds_slide.runtime.memory.tier_moves import Moved, move


def movable(runtime: Any) -> list[int]:
    """The units that may move, by their order."""
    return [unit.order for unit in runtime.units if why_fixed(runtime.parts.plan, unit.order) is None]


def promote(runtime: Any, *orders: int) -> Moved | None:
    """Promote these units, and no others."""
    return move(runtime, frozenset(orders) | runtime.parts.plan.placement.on_gpu)


def summable(runtime: Any) -> list[int]:
    """The units that may have a sum on the GPU, by their order."""
    return [unit.order for unit in runtime.units if may_sum(runtime.parts.plan, unit.order)]


def sum_on_gpu(runtime: Any, *orders: int) -> Moved | None:
    """Add up the gradients of these units on the GPU, and of no others."""
    placement = runtime.parts.plan.placement
    return move(runtime, placement.on_gpu | placement.promoted, summed=frozenset(orders))


class RandomSums:
    """`causal_loss` behind an attempt to give a random set of units sums on the GPU, in which all ranks draw the
    same."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.made: list[int] = []
        """Number of units with a sum in each step."""

    def __call__(self, engine: Any, batch: Batch) -> torch.Tensor:
        runtime = engine.optimizer.runtime
        chosen = [order for order in summable(runtime) if self._random.random() < 0.7]
        if sum_on_gpu(runtime, *chosen) is not None:
            assert {unit.order for unit in runtime.units if unit.gradient.gpu_sum is not None} == set(chosen)
            self.made.append(len(chosen))
        return causal_loss(engine, batch)


class RandomMoves:
    """`causal_loss` behind an attempt to move a random set of units, in which all ranks draw the same."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.made: list[Moved | None] = []

    def __call__(self, engine: Any, batch: Batch) -> torch.Tensor:
        self.move(engine.optimizer.runtime)
        return causal_loss(engine, batch)

    def move(self, runtime: Any) -> None:
        self.made.append(promote(runtime, *(order for order in movable(runtime) if self._random.random() < 0.5)))
