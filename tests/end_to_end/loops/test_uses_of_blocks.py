"""Every use of a block ends: towers without a differentiable input, passes without gradients, blocks used twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import pytest
import torch
from loops import WIDTH, Block, Run, assert_right, inputs, made, outcome, run_loop
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_rank")

BLOCKS = 6
Model = Callable[[], nn.Module]


class Stack(nn.Module):
    """Blocks behind an input. Notes how many gradients of blocks are on the device when each block's begins."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.inp, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 8)
        self.alive: list[int] = []

    def watched(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda _: self.alive.append(sum(p.grad is not None for p in self.blocks.parameters())))
        return x

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).float().pow(2).mean()


class Towers(Stack):
    """All blocks read the batch itself."""

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.read(x)
        return self.loss(sum(self.watched(block(x)) for block in self.blocks))  # type: ignore[arg-type]


class TowersBehindInput(Towers):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return self.inp(x)


class TowersBehindFrozen(TowersBehindInput):
    def __init__(self) -> None:
        super().__init__()
        self.inp.requires_grad_(False)


class FrozenTowers(Towers):
    """Every other tower has a frozen half, and one is frozen as a whole."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[::2]:
            block.down.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class UnusedParameters(Towers):
    """Parameters of towers that no forward uses, or not each."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [block.spare(block(x)) if index % 2 else block(x) for index, block in enumerate(self.blocks)]
        return self.loss(sum(parts))  # type: ignore[arg-type]


class Words(nn.Module):
    """Reads whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(16, WIDTH), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.words(x))


class WordTowers(Towers):
    def __init__(self) -> None:
        super().__init__(Words)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return (x.abs() * 7).long() % 16


class CheckpointedTowers(Towers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.watched(checkpoint(block, x, use_reentrant=False)) for block in self.blocks]
        return self.loss(sum(parts))  # type: ignore[arg-type]


class TowersWithDummy(Towers):
    """The re-entrant form gives gradients only where an input has one: scripts hand it a dummy beside the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dummy = torch.ones(1, requires_grad=True)

        def run(block: nn.Module, x: torch.Tensor, _dummy: torch.Tensor) -> torch.Tensor:
            return block(x)

        parts = [self.watched(checkpoint(run, block, x, dummy, use_reentrant=True)) for block in self.blocks]
        return self.loss(sum(parts))  # type: ignore[arg-type]


class Twice(Stack):
    """The first block reads the batch, and later what the last one has made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, *self.blocks[:3], *self.blocks]:
            x = block(x)
        return self.loss(x)


class TwiceInOneCheckpoint(Stack):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: block(block(x)), x, use_reentrant=self.use_reentrant)
        return self.loss(x)


class Attribute(Stack):
    """What the blocks read is no argument."""

    def __init__(self) -> None:
        super().__init__(Reading)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            block.stashed = x
            x = block()
        return self.loss(x)


class Reading(Block):
    stashed: torch.Tensor

    def forward(self) -> torch.Tensor:  # type: ignore[override]
        stashed, self.stashed = self.stashed, None  # type: ignore[assignment]
        return super().forward(stashed)


class Mapped(Stack):
    """The blocks run under `torch.func.vmap`, every other one with a second input that it shares."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            shared = x.mean(0)
            if index % 2:
                x = torch.func.vmap(lambda row, block=block, shared=shared: block(row + shared))(x)
            else:
                x = torch.func.vmap(block)(x.unflatten(0, (2, -1))).flatten(0, 1)
        return self.loss(x)


class MappedShared(Stack):
    """A block's only input is the same for all rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = torch.func.vmap(lambda row, shared, block=block: row + block(shared), (0, None))(x, x.mean(0))
        return self.loss(x)


Runs = Callable[[nn.Module, torch.Tensor], torch.Tensor]
WAYS: dict[str, Runs] = {
    "plain": lambda block, x: block(x),
    "re-entrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "not re-entrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "deepspeed": lambda block, x: deepspeed.checkpointing.checkpoint(block, x),
    "deepspeed, not re-entrant": lambda block, x: deepspeed.checkpointing.non_reentrant_checkpoint(block, x),
    "nested": lambda block, x: checkpoint(
        lambda x: checkpoint(block, x * 1.0, use_reentrant=True), x, use_reentrant=True
    ),
    "nested, mixed": lambda block, x: checkpoint(
        lambda x: checkpoint(block, x * 1.0, use_reentrant=False), x, use_reentrant=True
    ),
}


class Recycling(Stack):
    """Three passes without gradients, then one with them, as in structure prediction."""

    def __init__(self, way: str, rounds: int = 3) -> None:
        super().__init__()
        self.way, self.rounds = WAYS[way], rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inp(x)
        with torch.no_grad():
            for _ in range(self.rounds):
                for block in self.blocks:
                    h = self.way(block, h)
        h = self.inp(x) + h.detach()
        for block in self.blocks:
            h = self.watched(self.way(block, h))
        return self.loss(h)


def trained(run: Run, build: Model) -> list[float]:
    engine = run.start(made(build))
    losses = []
    for x in inputs(3):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def _loop(build: Model) -> Callable[[Run], Any]:
    return lambda run: trained(run, build)


def two_losses(run: Run) -> None:
    """Two towers' losses, of one forward, each with a backward of its own."""

    class Outputs(Towers):
        def forward(self, x: torch.Tensor) -> Any:
            parts = [block(x) for block in self.blocks]
            return self.loss(sum(parts[:3])), self.loss(sum(parts[2:]))  # type: ignore[arg-type]

    engine = run.start(made(Outputs), accumulation=2)
    for x in inputs(2):
        first, second = engine(x)
        engine.backward(first, retain_graph=True)
        engine.step()
        engine.backward(second)
        engine.step()


def dropped_graph(run: Run) -> None:
    """A tower whose result nobody uses, and a forward without a backward."""

    class Dropping(Towers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [block(x) for block in self.blocks]
            return self.loss(sum(parts[1:]))  # type: ignore[arg-type]

    engine = run.start(made(Dropping))
    for x in inputs(2):
        engine(x)
        engine.backward(engine(x))
        engine.step()


# Loop, and how it ends on stock.
LOOPS: dict[str, tuple[Callable[[Run], Any], str]] = {
    "towers": (_loop(Towers), "right"),
    "behind an input": (_loop(TowersBehindInput), "right"),
    "behind a frozen input": (_loop(TowersBehindFrozen), "right"),
    "frozen towers": (_loop(FrozenTowers), "right"),
    "unused parameters": (_loop(UnusedParameters), "right"),
    "towers of words": (_loop(WordTowers), "right"),
    "checkpointed towers": (_loop(CheckpointedTowers), "right"),
    "towers with a dummy": (_loop(TowersWithDummy), "right"),
    "attribute": (_loop(Attribute), "right"),
    "vmap": (_loop(Mapped), "error"),
    "vmap, shared input": (_loop(MappedShared), "error"),
    **{f"recycling, {way}": (_loop(lambda way=way: Recycling(way)), "right") for way in WAYS},
    "recycling, deepspeed, not re-entrant": (_loop(lambda: Recycling("deepspeed, not re-entrant")), "error"),
}
# These use a unit again in one backward, which needs gradients to be held.
HELD = {
    "twice": (_loop(Twice), "right"),
    "twice, re-entrant": (_loop(lambda: TwiceInOneCheckpoint(True)), "right"),
    "twice, not re-entrant": (_loop(lambda: TwiceInOneCheckpoint(False)), "right"),
    "two losses": (two_losses, "error"),
    "dropped graph": (dropped_graph, "right"),
}


@pytest.fixture(autouse=True)
def one_way_of_checkpointing() -> Iterator[None]:
    """DeepSpeed's checkpointing is set up for all of a process."""
    deepspeed.checkpointing.configure(None, num_checkpoints=BLOCKS)
    yield
    deepspeed.checkpointing.reset()


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    "name, clip", [*((name, clip) for name in LOOPS for clip in (1.0, 0.0)), *((name, 1.0) for name in HELD)]
)
def test_the_numbers_are_plain_torchs(name, clip):
    loop, _ = (LOOPS | HELD)[name]
    assert_right(run_loop(loop, "slide", clip=clip), run_loop(loop, "plain", clip=clip))


@pytest.mark.parametrize("name", ["towers", "vmap", "recycling, re-entrant"])
def test_the_default_window(name):
    loop, _ = LOOPS[name]
    assert_right(run_loop(loop, "slide", slide={}), run_loop(loop, "plain"))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", LOOPS | HELD)
def test_stock_is_as_the_table_says(name):
    loop, expected = (LOOPS | HELD)[name]
    assert outcome(loop, "stock") == expected


PER_BLOCK = len(list(Block().parameters()))


@pytest.mark.parametrize(
    "build",
    [Towers, TowersBehindInput, TowersBehindFrozen, CheckpointedTowers]
    + [lambda way=way: Recycling(way) for way in WAYS],
    ids=["towers", "behind an input", "behind a frozen input", "checkpointed towers", *WAYS],
)
def test_gradients_alive_in_a_backward_are_those_of_the_window(build):
    models = []

    def loop(run: Run) -> None:
        models.append(made(build))
        engine = run.start(models[0])
        for x in inputs(2):
            engine.backward(engine(x))
            engine.step()

    run_loop(loop, "slide")
    assert len(models[0].alive) == 2 * BLOCKS
    assert max(models[0].alive) <= 2 * PER_BLOCK


def test_a_pass_without_gradients_counts_no_use():
    """A checkpoint under `no_grad` is recomputed by nobody, though its function makes it look as if."""
    counted = []

    class Counting(Recycling):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.clone().requires_grad_()
            with torch.no_grad():
                for block in self.blocks:
                    self.way(block, h)
            counted.append([unit.uses.begun for unit in self.units])
            return super().forward(x)

    def loop(run: Run) -> None:
        model = made(lambda: Counting("re-entrant"))
        engine = run.start(model)
        model.units = engine.optimizer.runtime.blocks
        engine.backward(engine(inputs(1)[0]))

    run_loop(loop, "slide")
    assert counted == [[0] * BLOCKS]
