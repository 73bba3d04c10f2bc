"""A block that writes to what it gets, in place, trains as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from loops import WIDTH, Run, assert_right, inputs, made, outcome, run_loop
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

BLOCKS = 6


class Layer(nn.Module):
    """What it adds saves nothing of its input but a copy, so that a write in place is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sin(self.up(self.norm(x.clone()))))


class ReturnsNothing(Layer):
    def forward(self, x: torch.Tensor) -> None:
        x.add_(self.part(x))


class ReturnsInput(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.part(x)
        return x


class WritesTwice(Layer):
    """The second write reads the first one, and an operation behind both saves what they have made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(self.part(x)).mul_(0.5)
        return x.pow(2).mean()


class WritesView(Layer):
    """Writes to half of its input."""

    def forward(self, x: torch.Tensor) -> None:
        x[:, ::2].add_(self.part(x)[:, ::2])


class KeywordInput(Layer):
    def forward(self, *, x: torch.Tensor, beside: torch.Tensor) -> None:
        x.add_(self.part(x) * beside.clone())
        beside.mul_(0.9)


@dataclass
class State:
    x: torch.Tensor


class WritesField(Layer):
    """Writes to the tensor that an object holds."""

    def forward(self, state: State) -> None:
        state.x.add_(self.part(state.x))


class SetsField(Layer):
    """`+=` on a field writes to the tensor and sets the field."""

    def forward(self, state: State) -> State:
        state.x += self.part(state.x)
        return state


class Silent(Layer):
    """Writes while gradients are off: the bytes change, and no graph knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.mul_(0.5)
        return x + self.part(x)


class Model(nn.Module):
    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(layer() for _ in range(BLOCKS))

    def start(self, x: torch.Tensor) -> torch.Tensor:
        return self.inp(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            found = block(x)
            x = x if found is None else found
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.start(x))).float().pow(2).mean()


class Kept(Model):
    """The caller goes on with its own tensor, though the block returns one."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block(x)
        return x


class Summed(Model):
    """Each block's result is a part of the loss."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        total = x
        for block in self.blocks:
            own = x * 1.0
            total = total * (1 + block(own)) + own
        return total


class View(Model):
    """The blocks get a part of a larger tensor, which the head reads as a whole."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([x, x * 2])
        for block in self.blocks:
            block(whole[1:5])
        return whole


class Keywords(Model):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        beside = x * 1.0
        for block in self.blocks:
            block(x=x, beside=beside)
        return x + beside


class Fields(Model):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        state = State(x)
        for block in self.blocks:
            block(state)
        return state.x + x  # one tensor


class Frozen(Kept):
    """The first block writes to a tensor without a gradient."""

    def start(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def trained(run: Run, build: Callable[[], nn.Module]) -> list[float]:
    engine = run.start(made(build))
    losses = []
    for x in inputs(3):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        with torch.no_grad():
            losses.append(float(engine(x)))
    return losses


def _loop(model: type[Model], layer: type[Layer]) -> Callable[[Run], Any]:
    return lambda run: trained(run, lambda: model(layer))


# Loop, and how it ends on stock.
LOOPS = {
    "returns nothing": (_loop(Model, ReturnsNothing), "wrong"),
    "returns its input": (_loop(Model, ReturnsInput), "right"),
    "the caller keeps its own": (_loop(Kept, ReturnsInput), "wrong"),
    "writes twice": (_loop(Summed, WritesTwice), "wrong"),
    "writes a view": (_loop(Model, WritesView), "wrong"),
    "gets a view": (_loop(View, ReturnsNothing), "wrong"),
    "keywords": (_loop(Keywords, KeywordInput), "right"),
    "writes a field": (_loop(Fields, WritesField), "right"),
    "sets a field": (_loop(Fields, SetsField), "right"),
    "without a gradient": (_loop(Model, Silent), "right"),
    "frozen input": (_loop(Frozen, ReturnsNothing), "wrong"),
}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("name", LOOPS)
def test_the_numbers_are_plain_torchs(name, clip):
    loop, _ = LOOPS[name]
    assert_right(run_loop(loop, "slide", clip=clip), run_loop(loop, "plain", clip=clip))


@pytest.mark.parametrize("name", ["returns nothing", "sets a field"])
def test_the_default_window(name):
    loop, _ = LOOPS[name]
    assert_right(run_loop(loop, "slide", slide={}), run_loop(loop, "plain"))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", LOOPS)
def test_stock_is_as_the_table_says(name):
    loop, expected = LOOPS[name]
    assert outcome(loop, "stock") == expected


def test_a_leaf_is_refused_as_in_plain_torch():
    def loop(run: Run) -> None:
        engine = run.start(made(lambda: Frozen(ReturnsNothing)))
        engine.module.start = lambda x: x.clone().requires_grad_()
        engine.backward(engine(inputs(1)[0]))

    for system in ("plain", "slide"):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            run_loop(loop, system)


def test_a_tensor_that_was_saved_before_is_noticed_as_in_plain_torch():
    class Saved(Model):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            squared = x.pow(2)
            return squared.mean() + super().run(x)

    def loop(run: Run) -> None:
        engine = run.start(made(lambda: Saved(ReturnsNothing)))
        engine.backward(engine(inputs(1)[0]))

    for system in ("plain", "slide"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run_loop(loop, system)
