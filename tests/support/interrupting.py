"""A small model that can be made to fail at any place of forward and backward, and a client that goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import VOCABULARY, Batch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_slide.runtime.core.calls import in_backward
from ds_slide.runtime.core.futures import wait_on_stream
from ds_slide.runtime.weights.saved_weights import hooks_around

WIDTH, BLOCKS = 32, 4


class Failure(Exception):
    pass


class Interrupt(KeyboardInterrupt):
    """Torch calls no hook after one, not even those that are for always."""


class Trap:
    """Raises once at the place that it is set to."""

    def __init__(self) -> None:
        self.place = ""
        self.error: type[BaseException] = Failure

    def set(self, place: str, error: type[BaseException] = Failure) -> None:
        self.place, self.error = place, error

    def reach(self, place: str) -> None:
        if place == self.place:
            self.place = ""
            raise self.error(place)


class _Reached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trap: Trap, place: str, x: torch.Tensor) -> torch.Tensor:
        ctx.trap, ctx.place = trap, place
        trap.reach(f"{'recomputation' if in_backward() else 'forward'} of {place}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.trap.reach(f"backward of {ctx.place}")
        return None, None, gradient


class Block(nn.Module):
    def __init__(self, trap: Trap, name: str) -> None:
        super().__init__()
        self.trap, self.name = trap, name
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x))
        y = _Reached.apply(self.trap, self.name, y)
        return x + self.outer(nn.functional.gelu(y))


class Model(nn.Module):
    """Returns the loss. `reentrant`: of checkpointing, None for none."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trap, self.reentrant = Trap(), reentrant
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(self.trap, f"block {index}") for index in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            if x.requires_grad:
                x.register_hook(lambda _, place=f"hook on block {index}": self.trap.reach(place))
        x = _Reached.apply(self.trap, "the head", self.head(x))
        return nn.functional.cross_entropy(x.float().flatten(0, 1), labels.flatten())


def places(reentrant: bool | None) -> list[str]:
    """All places of the model, in the order of a step."""
    blocks = range(BLOCKS)
    back: list[str] = []
    for index in reversed(blocks):
        back.append(f"hook on block {index}")
        back += [] if reentrant is None else [f"recomputation of block {index}"]
        back.append(f"backward of block {index}")
    return [*(f"forward of block {index}" for index in blocks), "forward of the head", "backward of the head", *back]


def takes_nothing(place: str) -> bool:
    """Whether no gradient has left the parameters there, and no update has begun."""
    last = BLOCKS - 1
    return place.startswith("forward") or place.endswith((" the head", f" of block {last}", f"on block {last}"))


class Client:
    """Trains `engine`, a failure in between if it is told so, and keeps what it has caught, tracebacks included."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.model: Model = engine.module
        self.losses: list[float] = []
        self.caught: list[BaseException] = []

    def train(self, data: list[Batch], backward: Callable[[Any], None] | None = None) -> None:
        for batch in data:
            loss = self.engine(**batch)
            (backward or self.engine.backward)(loss)
            self.engine.step()
            self.losses.append(loss.item())

    def fail(self, batch: Batch, place: str, error: type[BaseException] = Failure) -> None:
        """A micro-batch that ends at `place`."""
        self.model.trap.set(place, error)
        try:
            self.engine.backward(self.engine(**batch))
        except error as caught:
            self.caught.append(caught)
        else:
            raise AssertionError(f"nothing has failed at {place}")


def check_that_nothing_is_left(engine: Any) -> None:
    """Between two steps: who owns which buffer is as at the start."""
    runtime = engine.optimizer.runtime
    assert hooks_around() is None
    assert [slot.bound for slot in runtime.parts.window.slots] == [0] * len(runtime.parts.window.slots)
    assert runtime.bindings.slots == {}
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    for staging in runtime.parts.gradients._stagings:
        wait_on_stream(staging.free, runtime.device, runtime.parts.context.recorder)
    runtime.parts.context.lanes.d2h.drain()
    runtime.parts.context.lanes.update.drain()


def windows(data: list[Batch], accumulation: int) -> Iterator[list[Batch]]:
    """The micro-batches of each step."""
    for first in range(0, len(data), accumulation):
        yield data[first : first + accumulation]
