"""Layers that change state of their own in their forward, in scripts without checkpointing: each call changes it once.

The engine may recompute layers of transformers though their script does not ask for it. A layer that counts, averages
or draws by itself would do so twice, and compute something else the second time.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from all_mixed import all_mixed
from loops import WIDTH, Block, Loop, Run, assert_right, inputs, made, outcome, run_loop
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.runtime.activations.block_state import SMALL

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 7
"""More than the engine's two decisions on spare memory, after steps 3 and 6."""
AMPLE: dict[str, Any] = {"window": 2, "gpu_memory": "1GiB"}
SLIDES: dict[str, dict[str, Any]] = {
    "ample": AMPLE,
    "small": {"window": 2, "gpu_memory": "150KB", "gpu_states": 0},
    "default": {"gpu_memory": "1GiB"},
}
"""Settings of "ds_slide". In the small one no block is kept, so each is recomputed in each step, if it may be."""


class Layer(transformers.GradientCheckpointingLayer):
    """A block, and the factor that a subclass makes of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * self.factor(x)

    def factor(self, _x: torch.Tensor) -> Any:
        return 1.0

    def seen_so_far(self) -> Any:
        """What the layer has come to."""
        return 0.0


class CountingInPlace(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def factor(self, _x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return 1 + 0.1 * self.seen

    def seen_so_far(self) -> float:
        return float(self.seen.max())


class CountingAnew(CountingInPlace):
    def factor(self, _x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return 1 + 0.1 * self.seen


class CountingInData(CountingInPlace):
    """Writes past the version counter, as much code for moving averages does."""

    def factor(self, _x: torch.Tensor) -> torch.Tensor:
        self.seen.data.add_(1)
        return 1 + 0.1 * self.seen


class CountingBehind(CountingInPlace):
    """Changes its state behind the last tensor that backward needs, where a recomputation has ended already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x) * (1 + 0.1 * self.seen)
        self.seen += 1
        return y


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.detach().float().mean(0), 0.5)
        return x - self.mean.to(x.dtype)


class Centered(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.center = RunningMean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.center(x))

    def seen_so_far(self) -> torch.Tensor:
        return self.center.mean.clone()


class CodeBook(Layer):
    """Takes the nearest of 16 codes, straight through, and moves it towards what it stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(16, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            nearest = torch.cdist(x.detach().float(), self.codes).argmin(1)
            chosen = self.codes[nearest].clone()
            self.codes.data[nearest] = torch.lerp(chosen, x.detach().float(), 0.3)
        return self.block(x + 0.5 * (chosen.to(x.dtype) - x).detach()) * (1 + 0.1 * self.codes.mean())

    def seen_so_far(self) -> torch.Tensor:
        return self.codes.clone()


class Router(Layer):
    """Two experts balanced by a bias, which moves against the load, without a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.block, self.other = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.route(x).softmax(-1)
        first = (scores + self.bias.to(scores.dtype)).argmax(-1) == 0
        with torch.no_grad():
            load = first.float().mean()
            self.bias += 0.2 * torch.stack([0.5 - load, load - 0.5]).sign()
        weight = torch.where(first, scores[:, 0], scores[:, 1]).unsqueeze(-1)
        return torch.where(first.unsqueeze(-1), self.block(x), self.other(x)) * weight

    def seen_so_far(self) -> torch.Tensor:
        return self.bias.clone()


class CountingInPython(Layer):
    calls = 0

    def factor(self, _x: torch.Tensor) -> float:
        self.calls += 1
        return 1 + 0.1 * self.calls

    def seen_so_far(self) -> int:
        return self.calls


class GrowingList(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.log: dict[str, list[float]] = {"means": []}

    def factor(self, x: torch.Tensor) -> float:
        self.log["means"].append(float(x.detach().float().mean()))
        return 1 + 0.1 * len(self.log["means"])

    def seen_so_far(self) -> list[float]:
        return list(self.log["means"])


class Statistics:
    def __init__(self) -> None:
        self.calls = 0
        self.sum = torch.zeros(WIDTH)


class WithAnObject(Layer):
    """Keeps its state in an object that is no module, a tensor among it."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = Statistics()

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        self.statistics.calls += 1
        self.statistics.sum += x.detach().float().sum(0)
        return 1 + 0.1 * self.statistics.calls + 0.01 * self.statistics.sum.tanh()

    def seen_so_far(self) -> tuple[int, torch.Tensor]:
        return self.statistics.calls, self.statistics.sum.clone()


class CountingInParent(Layer):
    """Writes into the whole model, which it reaches without being its parent."""

    def factor(self, _x: torch.Tensor) -> torch.Tensor:
        net = self.owner[0]
        net.total += 1
        return 1 + 0.01 * net.total

    def seen_so_far(self) -> float:
        return float(self.owner[0].total)


class WithAGenerator(Layer):
    """Drops its block at random, by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(len(x), 1, generator=self.generator) < 0.6
        return kept.to(x.dtype) / 0.6

    def seen_so_far(self) -> torch.Tensor:
        return self.generator.get_state().float()


class WithPythonsGenerator(Layer):
    def factor(self, _x: torch.Tensor) -> float:
        return 1 + random.random()


class StartingLate(CountingInPlace):
    """After a warm-up, and then only in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0  # set by the script, before each step

    def factor(self, _x: torch.Tensor) -> torch.Tensor:
        if self.step >= 3 and self.step % 2:
            self.seen += 1
        return 1 + 0.1 * self.seen.max()


class StartingLateInPython(StartingLate):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[int] = []

    def factor(self, _x: torch.Tensor) -> float:
        if self.step >= 3:
            self.values.append(self.step)
        return 1 + 0.1 * len(self.values)

    def seen_so_far(self) -> list[int]:
        return list(self.values)


class MovedFromOutside(CountingInPlace):
    """Computes with what the script changes between a forward and its backward."""

    def factor(self, _x: torch.Tensor) -> torch.Tensor:
        return 1 + 0.1 * self.seen


class Net(transformers.PreTrainedModel):
    config_class, supports_gradient_checkpointing = transformers.PretrainedConfig, True

    def __init__(self, layer: Callable[[], Layer], blocks: int = 4) -> None:
        super().__init__(transformers.PretrainedConfig())
        self.inp, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.layers = nn.ModuleList(layer() for _ in range(blocks))
        self.register_buffer("total", torch.zeros(()))
        for each in self.layers:
            each.owner = [self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().pow(2).mean()

    def seen_so_far(self) -> list[Any]:
        return [layer.seen_so_far() for layer in self.layers]


def net(layer: type[Layer]) -> Net:
    random.seed(0)
    return made(lambda: Net(layer))  # type: ignore[return-value]


def stepping(layer: type[Layer]) -> Loop:
    """Steps of a model of such layers. The loop is named after the layer."""

    def loop(run: Run) -> list[Any]:
        model = net(layer)
        engine = run.start(model)
        losses = []
        for step, x in enumerate(inputs(STEPS)):
            for each in model.layers:
                each.step = step
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        return [losses, model.seen_so_far()]

    loop.__name__ = layer.__name__
    return loop


def asking(layer: type[Layer], *, reentrant: bool) -> Loop:
    """The script asks for checkpointing: plain torch changes the state once more in each recomputation."""

    def loop(run: Run) -> list[Any]:
        model = net(layer)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        engine = run.start(model)
        for x in inputs(STEPS):
            engine.backward(engine(x))
            engine.step()
        return model.seen_so_far()

    return loop


def evaluating_in_between(run: Run) -> list[Any]:
    """Each second step, and also between a forward and its backward."""
    model = net(CountingInPlace)
    engine = run.start(model)
    losses = []
    for step, x in enumerate(inputs(STEPS)):
        engine.train()
        loss = engine(x)
        if step % 2:
            engine.eval()
        engine.backward(loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            losses += [float(loss), float(engine(x))]
    return [losses, model.seen_so_far()]


def accumulating(run: Run) -> list[Any]:
    """Two forwards, and then their backwards."""
    model = net(CountingAnew)
    engine = run.start(model)
    for first, second in zip(inputs(4), inputs(4, seed=2), strict=True):
        engine.backward(engine(first) + engine(second))
        engine.step()
    return model.seen_so_far()


def calling_twice(run: Run) -> list[Any]:
    """Each layer is called two times in one forward."""

    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            for layer in self.layers:
                x = layer(layer(x))
            return self.head(x).float().pow(2).mean()

    model = made(lambda: Twice(CountingAnew))
    engine = run.start(model, slide={"defer_updates": True})
    for x in inputs(STEPS):
        engine.backward(engine(x))
        engine.step()
    return model.seen_so_far()  # type: ignore[operator,no-any-return]


def moving_from_outside(run: Run) -> list[Any]:
    model = net(MovedFromOutside)
    engine = run.start(model)
    for x in inputs(STEPS):
        loss = engine(x)
        for layer in model.layers:
            layer.seen += 1
        engine.backward(loss)
        engine.step()
    return model.seen_so_far()


def sharing_a_layer(run: Run) -> list[Any]:
    """The layers are those of another model, too, which the script evaluates before each backward."""
    model = net(CountingInPython)
    other = nn.ModuleList([model.layers[0], model.layers[2]])
    engine = run.start(model)
    for x in inputs(STEPS):
        loss = engine(x)
        for layer in other:
            layer.factor(x)
        engine.backward(loss)
        engine.step()
    return model.seen_so_far()


KINDS = [
    CountingInPlace,
    CountingAnew,
    CountingInData,
    CountingBehind,
    Centered,
    CodeBook,
    Router,
    CountingInPython,
    GrowingList,
    WithAnObject,
    CountingInParent,
    WithAGenerator,
    WithPythonsGenerator,
    StartingLate,
    StartingLateInPython,
]
OTHERS: list[Loop] = [evaluating_in_between, accumulating, calling_twice, moving_from_outside, sharing_a_layer]
LOOPS = [*map(stepping, KINDS), *OTHERS]
"""Stock recomputes nothing, so it has plain torch's numbers in all of them."""

plain = functools.cache(functools.partial(run_loop, system="plain"))


@pytest.mark.by_turns(4)
@pytest.mark.parametrize(("clip", "slide"), [(1.0, "ample"), (1.0, "small"), (0.0, "small"), (0.0, "default")])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_numbers_are_plain_torchs(loop: Loop, clip: float, slide: str) -> None:
    assert_right(run_loop(loop, "slide", clip=clip, slide=SLIDES[slide]), plain(loop, clip=clip))


@pytest.mark.parametrize("loop", [stepping(CountingInPlace), *OTHERS], ids=lambda loop: loop.__name__)
def test_stock_has_plain_torchs_numbers(loop: Loop) -> None:
    assert outcome(loop, "stock") == "right"


def recomputed(layer: type[Layer], slide: Mapping[str, Any]) -> list[int]:
    """How many blocks are recomputed, step by step."""
    found: list[int] = []

    def loop(run: Run) -> None:
        engine = run.start(net(layer))
        for x in inputs(STEPS):
            engine.backward(engine(x))
            engine.step()
            found.append(engine.optimizer.runtime.parts.spare.activations.statistics["checkpointed"])

    run_loop(loop, "slide", slide=slide)
    return found


def test_a_layer_that_changes_its_state_is_not_recomputed_any_more() -> None:
    """And one that changes none is, as long as memory is short."""
    small = SLIDES["small"]
    assert recomputed(CountingInPlace, small) == [4] + [0] * (STEPS - 1)
    assert recomputed(Layer, small) == [4] * STEPS


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layer", [CountingInPlace, CountingInPython])
def test_recomputation_that_the_script_asks_for_is_torchs_own(layer: type[Layer], reentrant: bool) -> None:
    """Kept or not, and not only while memory is short. The re-entrant form goes on to the end of the layer; the other
    one ends behind the last tensor that backward needs, and so before the layer counts in Python."""
    loop = asking(layer, reentrant=reentrant)
    expected = plain(loop)
    assert expected.returned == [STEPS if layer is CountingInPython and not reentrant else 2 * STEPS] * 4
    for slide in SLIDES.values():
        assert_right(run_loop(loop, "slide", slide=slide), expected)


@pytest.mark.parametrize("layer", [StartingLate, StartingLateInPython])
def test_blocks_that_keep_some_results_are_recomputed_with_the_state_of_before(layer: type[Layer]) -> None:
    loop = stepping(layer)
    with all_mixed():
        assert_right(run_loop(loop, "slide", slide=AMPLE), plain(loop))


class LargeStartingLate(StartingLate):
    """Its buffer is too large to be copied in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(SMALL)


def test_a_large_buffer_that_changes_late_ends_in_a_sentence() -> None:
    """At the call that has changed it, where it is to be recomputed, and not at all where it is kept."""
    loop = stepping(LargeStartingLate)
    with pytest.raises(SlideError, match=r"layers\.0 has changed layers\.0\.seen in a forward .* \"as_written\""):
        run_loop(loop, "slide", slide=SLIDES["small"])
    assert_right(run_loop(loop, "slide", slide={**AMPLE, "activations": "as_written"}), plain(loop))
