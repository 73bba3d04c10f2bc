"""Embeddings with sparse gradients train as those with dense ones: in blocks, outside of them, and tied to a head."""

from __future__ import annotations

import pytest
import torch
from loops import WIDTH, Block, Net, Run, assert_right, made, run_loop
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

VOCABULARY = 50


def tokens(count: int = 4, batch: int = 4, length: int = 6) -> list[torch.Tensor]:
    """Numbers of words ([batch, length] each); some come twice, most never."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCABULARY // 2, (batch, length), generator=generator) for _ in range(count)]


class Reader(Net):
    """Reads words through an embedding outside of the blocks."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(self.words(words))


class Tied(Reader):
    """Its gradient is sparse from the embedding and dense from the head."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        made = self.hidden(self.words(words)) @ self.words.weight.t()
        return nn.functional.cross_entropy(made.flatten(0, 1), words.flatten())


class TypedBlock(Block):
    """A block with an embedding of its own, as layers with relative positions have."""

    def __init__(self, width: int, sparse: bool) -> None:
        super().__init__(width)
        self.kinds = nn.Embedding(3, width, sparse=sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.kinds(torch.arange(x.shape[1]) % 2))


class Typed(Net):
    def __init__(self, sparse: bool) -> None:
        super().__init__(block=lambda width: TypedBlock(width, sparse))
        self.words = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(self.words(words))


class Bag(Reader):
    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.words = nn.EmbeddingBag(VOCABULARY, WIDTH, sparse=sparse)  # type: ignore[assignment]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("slide", [{"window": 2}, {}, {"gpu_states": "1GiB"}], ids=["window 2", "default", "on GPU"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("model", [Reader, Tied, Typed, Bag])
def test_the_numbers_are_those_of_dense_gradients(model, clip, accumulation, slide):
    def loop(run: Run) -> float:
        engine = run.start(made(lambda: model(sparse=run.system != "plain")), accumulation=accumulation)
        for words in tokens():
            engine(words).backward()
            engine.step()
        return float(engine.get_global_grad_norm())

    assert_right(run_loop(loop, "slide", clip=clip, slide=slide), run_loop(loop, "plain", clip=clip))
