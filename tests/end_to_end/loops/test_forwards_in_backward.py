"""A forward that begins in a hook of backward is a new one: gradient caching embeds its mini-batches again there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import Net, Run, assert_right, inputs, made, outcome, run_loop
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")

BLOCKS = 6
MINI_BATCHES = 3


class Encoder(Net):
    """`way`: of activation checkpointing. The whole model's forward gives embeddings, [batch, 8]."""

    def __init__(self, way: bool | None = None) -> None:
        super().__init__(BLOCKS)
        self.way = way
        self.alive: list[int] = []

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x) if self.way is None else checkpoint(block, x, use_reentrant=self.way)
            if x.requires_grad:
                x.register_hook(lambda _: self.alive.append(sum(p.grad is not None for p in self.blocks.parameters())))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x))


class CachedLoss:
    """As sentence-transformers' CachedMultipleNegativesRankingLoss: embeds without gradients, takes the loss of the
    embeddings, and embeds each mini-batch again with gradients in a hook of the loss."""

    def __init__(self, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.embed = embed

    def __call__(self, batches: list[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            embedded = [self.embed(x) for x in batches]
        embedded = [each.detach().requires_grad_() for each in embedded]
        scores = torch.cat(embedded).float()
        loss = nn.functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)).roll(1))
        gradients = torch.autograd.grad(loss, embedded)
        loss = loss.detach().requires_grad_()
        loss.register_hook(lambda scale: self._again(batches, gradients, scale))
        return loss / 1.0  # as the trainer does

    def _again(self, batches: list[torch.Tensor], gradients: Any, scale: torch.Tensor) -> None:
        with torch.enable_grad():
            for x, gradient in zip(batches, gradients, strict=True):
                surrogate = (self.embed(x).flatten() * gradient.flatten()).sum() * scale
                surrogate.backward()


def cached(
    run: Run, embed: Callable[[Any], Any], way: bool | None = None, evaluate: bool = False, direct: bool = False
) -> float:
    """`direct`: by `loss.backward()`."""
    engine = run.start(made(lambda: Encoder(way)))
    loss_of = CachedLoss(embed(engine))
    batches = inputs(3 * MINI_BATCHES)
    for step in range(3):
        loss = loss_of(batches[step * MINI_BATCHES : (step + 1) * MINI_BATCHES])
        loss.backward() if direct else engine.backward(loss)
        engine.step()
        if evaluate:
            engine.eval()
            with torch.no_grad():
                engine(batches[0])
            engine.train()
    return float(loss.detach())


def hidden_in_module_hook(run: Run) -> None:
    """A full backward hook of the head runs the blocks once more, with a loss and a backward of its own."""
    model = made(Encoder)
    engine = run.start(model)
    xs = inputs(4)
    seen: list[torch.Tensor] = []

    def hook(*_: Any) -> None:
        with torch.enable_grad():
            model.hidden(seen[-1]).float().pow(2).mean().backward()

    model.head.register_full_backward_hook(hook)
    for x in xs:
        seen.append(x.flip(0))
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()


def log_in_hook(run: Run) -> list[float]:
    """A hook in the middle of backward, and a callback at its end, run the model for a log."""
    model = made(Encoder)
    engine = run.start(model)
    logged: list[float] = []
    xs = inputs(4)

    def look(_: Any = None) -> None:
        with torch.no_grad():
            logged.append(float(model(xs[0]).float().pow(2).mean()))

    def hook(_: torch.Tensor) -> None:
        look()
        torch.autograd.Variable._execution_engine.queue_callback(look)

    for x in xs[:2]:
        hidden = model.head.register_forward_pre_hook(lambda _, given: given[0].register_hook(hook) and None)
        loss = engine(x).float().pow(2).mean()
        hidden.remove()
        engine.backward(loss)
        engine.step()
    return logged


def penalty_in_hook(run: Run) -> None:
    """A hook of the blocks' input: all blocks have had their backward, and run once more for a second loss."""
    model = made(Encoder)
    engine = run.start(model)
    xs = inputs(3)

    def again(_: torch.Tensor) -> None:
        with torch.enable_grad():
            (model(xs[2]).float().pow(2).mean() * 0.5).backward()

    for x in xs[:2]:
        watch = model.inp.register_forward_hook(lambda _module, _given, made: made.register_hook(again) and None)
        loss = engine(x).float().pow(2).mean()
        watch.remove()
        engine.backward(loss)
        engine.step()


def module_called(run: Run) -> None:
    """The engine's module is called, not the engine, over two micro-batches."""
    engine = run.start(made(Encoder), accumulation=2 if run.clip else 1)
    for x in inputs(6):
        engine.backward(engine.module(x).float().pow(2).mean())
        engine.step()


def _cached(embed: Callable[[Any], Any], way: bool | None = None, **more: bool) -> Callable[[Run], Any]:
    return lambda run: cached(run, embed, way, **more)


# Loop, and how it ends on stock.
LOOPS: dict[str, tuple[Callable[[Run], Any], str]] = {
    "engine": (_cached(lambda engine: engine), "error"),
    "engine, evaluated": (_cached(lambda engine: engine, evaluate=True), "error"),
    "module": (_cached(lambda engine: engine.module), "error"),
    "part of the module": (_cached(lambda engine: lambda x: engine.module.head(engine.module.hidden(x))), "error"),
    "engine, re-entrant": (_cached(lambda engine: engine, True), "error"),
    "engine, not re-entrant": (_cached(lambda engine: engine, False), "error"),
    "module, not re-entrant": (_cached(lambda engine: engine.module, False), "error"),
    "hidden in a module hook": (hidden_in_module_hook, "error"),
    "log in a hook": (log_in_hook, "right"),
    "module called": (module_called, "wrong"),
}
# These use a block again whose update has begun, where gradients are not held.
HELD = {
    "penalty in a hook": (penalty_in_hook, "error"),
    "loss.backward": (_cached(lambda engine: engine, direct=True), "right"),
}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    "name, clip", [*((name, clip) for name in LOOPS for clip in (1.0, 0.0)), *((name, 1.0) for name in HELD)]
)
def test_the_numbers_are_plain_torchs(name, clip):
    loop, _ = (LOOPS | HELD)[name]
    assert_right(run_loop(loop, "slide", clip=clip), run_loop(loop, "plain", clip=clip))


@pytest.mark.parametrize("name", ["engine", "module"])
def test_the_default_window(name):
    loop, _ = LOOPS[name]
    assert_right(run_loop(loop, "slide", slide={}), run_loop(loop, "plain"))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", LOOPS | HELD)
def test_stock_is_as_the_table_says(name):
    loop, expected = (LOOPS | HELD)[name]
    assert outcome(loop, "stock") == expected


def test_a_forward_that_would_read_new_weights_is_refused():
    with pytest.raises(SlideError, match=r'blocks\.0 began in a hook of a backward .*"defer_updates": true'):
        run_loop(penalty_in_hook, "slide", clip=0.0)


@pytest.mark.parametrize("name", ["engine", "module"])
def test_gradients_leave_while_mini_batches_run(name):
    """Those of the window are alive, not those of the model."""
    models: list[Encoder] = []

    def loop(run: Run) -> None:
        engine = run.start(made(Encoder))
        models.append(engine.module)
        loss_of = CachedLoss(engine if name == "engine" else engine.module)
        engine.backward(loss_of(inputs(MINI_BATCHES)))
        engine.step()

    run_loop(loop, "slide")
    assert len(models[0].alive) == MINI_BATCHES * BLOCKS and max(models[0].alive) == 0
