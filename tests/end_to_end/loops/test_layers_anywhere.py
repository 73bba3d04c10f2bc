"""Models whose layers are in no list: streamed all the same, with plain torch's numbers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from loops import WIDTH, Block, Loop, Run, assert_right, inputs, made, run_loop
from torch import nn

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")

LAYERS = 6


class Base(nn.Module):
    """An input and a head; `run` goes through the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.inp(x))).float().pow(2).mean()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Dictionary(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer{i}": Block() for i in range(LAYERS)})

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(0).chunk(3, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).squeeze(0))


class Pairs(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), Block()]) for _ in range(LAYERS))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for attention, feed_forward in self.layers:
            x = attention(x) + x
            x = feed_forward(x)
        return x


class Numbered(Base):
    """Registered in another order than used."""

    def __init__(self) -> None:
        super().__init__()
        for i in (2, 0, 1, 5, 4, 3):
            setattr(self, f"layer{i}", Block())

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(LAYERS):
            x = getattr(self, f"layer{i}")(x)
        return x


class Alone(Base):
    """No two of its modules are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def steps(engine: Any) -> list[float]:
    losses = []
    for x in inputs(4):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def dictionary(run: Run) -> list[float]:
    return steps(run.start(made(Dictionary)))


def pairs(run: Run) -> list[float]:
    return steps(run.start(made(Pairs)))


def numbered(run: Run) -> list[float]:
    return steps(run.start(made(Numbered)))


def named(run: Run) -> list[float]:
    return steps(run.start(made(Numbered), slide={"blocks": ["layer[0-3]"]}))


LOOPS: list[Loop] = [dictionary, pairs, numbered, named]
SLIDES = [{"window": 2}, {}]


@pytest.mark.by_turns(4)
@pytest.mark.parametrize("slide", SLIDES, ids=["window 2", "default"])
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_numbers_are_plain_torchs(loop: Loop, clip: float, slide: dict[str, Any]) -> None:
    assert_right(run_loop(loop, "slide", clip=clip, slide=slide), run_loop(loop, "plain", clip=clip))


@pytest.mark.parametrize("build", [Dictionary, Pairs, Numbered])
def test_a_model_larger_than_its_share_of_the_gpu_is_streamed(build: type[Base]) -> None:
    """Its weights and gradients would take 400 KB and more."""

    def loop(run: Run) -> list[float]:
        return steps(run.start(made(build)))

    slide = {"window": 2, "gpu_memory": "150KB", "gpu_states": 0}
    assert_right(run_loop(loop, "slide", slide=slide), run_loop(loop, "plain"))


def alone(run: Run) -> list[float]:
    return steps(run.start(made(Alone)))


def test_a_model_without_blocks_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ds_slide"):
        run_loop(alone, "slide")
        run_loop(pairs, "slide")
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert said.getMessage().startswith("this model has no blocks (no layers of one class in it repeat and hold")
    assert "bytes beside activations" in said.getMessage() and "name them in ds_slide.blocks" in said.getMessage()


def test_where_it_does_not_fit_the_way_out_is_named() -> None:
    with pytest.raises(SlideError, match=r"name layers that can be streamed in ds_slide\.blocks \(none were found\)"):
        run_loop(alone, "slide", slide={"gpu_memory": "20KB", "gpu_states": 0})
