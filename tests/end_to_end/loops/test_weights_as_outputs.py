"""Blocks that return a weight, or a view of it, which the model uses when the block has ended: a linear layer that
returns its bias for the next layer to add, learned queries that a layer hands on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from loops import WIDTH, Loop, Net, Run, assert_right, inputs, made, outcome, run_loop
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

pytestmark = pytest.mark.usefixtures("one_rank")

BLOCKS = 7


class Later(nn.Module):
    """Adds the bias of the block before it, and returns its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(width, width), nn.Parameter(0.3 * torch.randn(width))

    def given(self) -> Any:
        return self.bias.view(1, -1)

    def taken(self, given: Any) -> torch.Tensor:
        return given

    def forward(self, both: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        x = both[0] + self.taken(both[1])
        return x + nn.functional.gelu(self.linear(x)), self.given()


class Whole(Later):
    def given(self):
        return self.bias


class InDictionary(Later):
    def given(self):
        return {"bias": [self.bias[None], None]}

    def taken(self, given):
        return given["bias"][0] if isinstance(given, dict) else given


@dataclass
class Both:
    """Iterates like the tuple of its fields."""

    x: torch.Tensor
    given: torch.Tensor

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.x, self.given)[index]


class InObject(Later):
    def forward(self, both):
        return Both(*super().forward(both))


class Queries(Later):
    """Four rows of a matrix. They are saved for the product, too."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.bias
        self.rows = nn.Parameter(1 + 0.3 * torch.randn(512, width))

    def given(self):
        return self.rows[:4]

    def taken(self, given):
        return given * given


class WithoutGradient(Queries):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.rows.requires_grad_(False)


def each(blocks: nn.ModuleList, x: Any) -> Any:
    for block in blocks:
        x = block(x)
    return x


def checkpointed(blocks: nn.ModuleList, x: Any) -> Any:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def checkpointed_together(blocks: nn.ModuleList, x: Any) -> Any:
    return checkpoint_sequential(list(blocks), 2, x, use_reentrant=False)


def in_evaluation(blocks: nn.ModuleList, x: Any) -> Any:
    with torch.no_grad():
        offset = each(blocks, x)[1]
    x, given = each(blocks, x)
    return x + blocks[0].taken(offset), given


def trained(block: Callable[[int], nn.Module], way: Callable[[nn.ModuleList, Any], Any] = each) -> Loop:
    class Model(Net):
        def hidden(self, x: torch.Tensor) -> torch.Tensor:
            x, given = way(self.blocks, (self.inp(x), torch.zeros(1, WIDTH)))
            return x + self.blocks[0].taken(given)  # type: ignore[operator]

    def loop(run: Run) -> None:
        engine = run.start(made(lambda: Model(BLOCKS, block=block)))
        for x in inputs(4):
            engine.backward(engine(x))
            engine.step()

    return loop


LOOPS = {
    "view": trained(Later),
    "whole": trained(Whole),
    "in-dictionary": trained(InDictionary),
    "in-object": trained(InObject),
    "queries": trained(Queries),
    "without-gradient": trained(WithoutGradient),
    "checkpointed": trained(Queries, checkpointed),
    "checkpointed-together": trained(Queries, checkpointed_together),
    "in-evaluation": trained(Queries, in_evaluation),
}


@pytest.mark.parametrize("slide", [{"window": 2}, {"gpu_memory": "1GiB", "captured_blocks": True}])
@pytest.mark.parametrize("name", LOOPS)
def test_the_numbers_are_plain_torchs(name: str, slide: dict[str, Any]) -> None:
    assert_right(run_loop(LOOPS[name], "slide", slide=slide), run_loop(LOOPS[name], "plain"))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", LOOPS)
def test_stock_is_as_the_table_says(name: str) -> None:
    assert outcome(LOOPS[name], "stock") == "right"
