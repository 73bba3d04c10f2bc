"""Batches for `finetune.py`: each is a pure function of its position, so a resumed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

# The token after each document where a byte is a token: the first id that no byte has.
DOCUMENT_END = 256
HELD_OUT_FRACTION = 0.05


class Batches(Protocol):
    """A source of token batches for one rank: int64 of shape [batch, seq] in host memory."""

    def train(self, position: int) -> torch.Tensor:
        """The micro-batch at `position` (0, 1, 2, ... over the whole run, accumulation steps included)."""

    def held_out(self, position: int) -> torch.Tensor:
        """Batch `position` of the evaluation set, which training never shows."""


@dataclass(frozen=True)
class Shape:
    """How the data is cut: `batch` rows of `seq` tokens for each of `world_size` ranks."""

    batch: int
    seq: int
    rank: int = 0
    world_size: int = 1


def seed_of(*key: int | str) -> int:
    """A 32-bit seed for this key alone.

    Hashed because torch's Mersenne twister takes only the low 32 bits of a seed: parts shifted up would be lost.
    """
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "little")


def generator(*key: int | str) -> torch.Generator:
    """A host generator for this key alone."""
    return torch.Generator().manual_seed(seed_of(*key))


class RandomTokens:
    """Uniform tokens from a fixed generator: every system that is compared sees the same, without a download."""

    def __init__(self, vocabulary: int, shape: Shape, seed: int) -> None:
        self._vocabulary = vocabulary
        self._shape = shape
        self._seed = seed

    def train(self, position: int) -> torch.Tensor:
        return self._draw("train", position)

    def held_out(self, position: int) -> torch.Tensor:
        return self._draw("held out", position)

    def _draw(self, part: str, position: int) -> torch.Tensor:
        size = (self._shape.batch, self._shape.seq)
        return torch.randint(
            0, self._vocabulary, size, generator=generator(self._seed, part, position, self._shape.rank)
        )


class TextWindows:
    """Windows of `seq` tokens cut from one token stream, in a new order every epoch; the last 5 % are held out."""

    def __init__(self, tokens: torch.Tensor, shape: Shape, seed: int) -> None:
        num_windows = tokens.numel() // shape.seq
        self._num_held_out = max(1, int(num_windows * HELD_OUT_FRACTION))
        self._num_train = num_windows - self._num_held_out
        rows = shape.batch * shape.world_size
        if self._num_train < rows:
            raise ValueError(
                f"--data holds {tokens.numel()} tokens, so {num_windows} windows of --seq {shape.seq}, but a batch of "
                f"{shape.world_size} rank(s) takes {rows} and {self._num_held_out} are held out: give more text, or a "
                "smaller --batch or --seq"
            )
        self._windows = tokens[: num_windows * shape.seq].view(num_windows, shape.seq)
        self._shape = shape
        self._seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def train(self, position: int) -> torch.Tensor:
        return self._windows[[self._train_window(row) for row in self._rows(position)]]

    def held_out(self, position: int) -> torch.Tensor:
        return self._windows[[self._num_train + row % self._num_held_out for row in self._rows(position)]]

    def _rows(self, position: int) -> range:
        first = (position * self._shape.world_size + self._shape.rank) * self._shape.batch
        return range(first, first + self._shape.batch)

    def _train_window(self, row: int) -> int:
        epoch, place = divmod(row, self._num_train)
        if epoch != self._epoch:
            self._order = torch.randperm(self._num_train, generator=generator(self._seed, "epoch", epoch))
            self._epoch = epoch
        return int(self._order[place])


def encode_bytes(text: str) -> list[int]:
    """UTF-8 bytes as token ids 0..255."""
    return list(text.encode("utf-8"))


def python_topics() -> list[str]:
    """The help topics of the Python library: about 450 KB of English wherever Python is."""
    topics = pydoc_data.topics.topics
    return [topics[name] for name in sorted(topics)]


def load_batches(
    data: str | None, shape: Shape, *, vocabulary: int, encode: Callable[[str], list[int]], document_end: int, seed: int
) -> Batches:
    """The source named by `--data`: a text file, "random", or None for the help topics of the Python library.

    Raises ValueError when the text is too short for a batch or its tokens exceed the vocabulary, OSError when it
    cannot be read.
    """
    if data == "random":
        return RandomTokens(vocabulary, shape, seed)
    documents = python_topics() if data is None else [Path(data).read_text(encoding="utf-8", errors="replace")]
    tokens = torch.tensor([token for text in documents for token in (*encode(text), document_end)], dtype=torch.int64)
    if int(tokens.max()) >= vocabulary:
        raise ValueError(
            f"--data yields token {int(tokens.max())}, but the model has a vocabulary of {vocabulary}: "
            "use --data random, or a model directory with its own tokenizer"
        )
    return TextWindows(tokens, shape, seed)
