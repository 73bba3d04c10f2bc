"""What a block changes in its forward is found, and put back for its recomputation."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_slide.runtime.activations.block_state import FIRST_CALLS, SMALL, BlockState, WatchedCall
from ds_slide.runtime.activations.checkpointing import UNASKED, BlockCall
from ds_slide.runtime.core.unit import Uses

TALLY = [0]


class Layer(nn.Module):
    shared: list[int] = []  # noqa: RUF012
    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("buffer", torch.zeros(3))
        self.register_buffer("large", torch.zeros(SMALL))
        self.number, self.words, self.names = 0, ["a"], {"b"}
        self.nested = {"deque": deque([1]), "pair": (torch.zeros(2), [0])}
        self.object = SimpleNamespace(count=0, tensor=torch.zeros(2))
        self.generator, self.random = torch.Generator().manual_seed(1), random.Random(1)
        self.numpy, self.legacy = np.random.default_rng(1), np.random.RandomState(1)

    def tally(self) -> None:
        TALLY[0] += 1


def _set(name: str, value: Any) -> Callable[[Layer], None]:
    return lambda layer: setattr(layer, name, value)


def _new_buffer(layer: Layer) -> None:
    layer.register_buffer("another", torch.ones(1))


def _no_buffer(layer: Layer) -> None:
    del layer.buffer


WRITES: dict[str, Callable[[Layer], Any]] = {
    "in place": lambda layer: layer.buffer.add_(1),
    "in data": lambda layer: layer.buffer.data.add_(1),
    "assigned": lambda layer: setattr(layer, "buffer", layer.buffer + 1),
    "new buffer": _new_buffer,
    "removed buffer": _no_buffer,
    "number": _set("number", 1),
    "attribute": _set("further", 1),
    "training": lambda layer: layer.drop.eval(),
    "list": lambda layer: layer.words.append("c"),
    "set": lambda layer: layer.names.add("c"),
    "deque": lambda layer: layer.nested["deque"].append(2),
    "tensor in a tuple": lambda layer: layer.nested["pair"][0].add_(1),
    "list in a tuple": lambda layer: layer.nested["pair"][1].append(1),
    "object": lambda layer: setattr(layer.object, "count", 1),
    "tensor of an object": lambda layer: layer.object.tensor.data.add_(1),
    "generator": lambda layer: torch.rand(1, generator=layer.generator),
    "Python's generator": lambda layer: layer.random.random(),
    "Numpy's generator": lambda layer: layer.numpy.random(),
    "Numpy's old generator": lambda layer: layer.legacy.rand(),
    "class": lambda layer: setattr(type(layer), "total", type(layer).total + 1),
    "list of the class": lambda layer: layer.shared.append(1),
    "global name": lambda layer: layer.tally(),
}
AT_FIRST = {
    "all of Python's": lambda _: random.random(),
    "all of Numpy's": lambda _: np.random.rand(),
    "large": lambda layer: layer.large.data.add_(1),
}
"""What is looked at in the first calls only."""

PAST_VERSIONS = {"in data", "tensor of an object"}


def shown(layer: Layer) -> list[Any]:
    """All that the writes change."""
    tensors = [*layer.buffers(), layer.nested["pair"][0], layer.object.tensor]
    generators = layer.generator.get_state().tolist(), layer.random.getstate(), str(layer.legacy.get_state())
    return [
        [tensor.tolist() if tensor.numel() < 10 else tensor.sum().item() for tensor in tensors],
        [*generators, layer.numpy.bit_generator.state, random.getstate(), str(np.random.get_state())],
        [list(dict(layer.named_buffers())), layer.number, hasattr(layer, "further"), layer.drop.training],
        [list(layer.words), set(layer.names), list(layer.nested["deque"]), list(layer.nested["pair"][1])],
        [layer.object.count, Layer.total, list(Layer.shared), list(TALLY)],
    ]


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("earlier", [0, FIRST_CALLS + 1], ids=["first", "later"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_undone_for_each_recomputation(write: str, earlier: int) -> None:
    """And what is there now is put back behind it. In later calls a write past the version counter is not noticed, but
    small tensors are put back all the same."""
    layer, seen = Layer(), list[Any]()
    state = BlockState("layer", layer)
    for _ in range(earlier):
        assert not state.after(state.before())

    def function() -> None:
        seen.append(shown(layer))
        WRITES[write](layer)
        seen.append(shown(layer))

    unit: Any = SimpleNamespace(parts=[], parameters=list(layer.parameters()), experts={}, uses=Uses())
    call = WatchedCall(state, BlockCall(unit, [], UNASKED, function, ()))
    call()
    call.check()
    now = shown(layer)
    assert call.has_changed == (not earlier or write not in PAST_VERSIONS)
    for _ in range(2):
        call()
        assert seen[-2:] == seen[:2]
        assert shown(layer) == now


@pytest.mark.parametrize("write", AT_FIRST)
def test_in_the_first_calls_more_is_looked_at(write: str) -> None:
    layer = Layer()
    state = BlockState("layer", layer)
    before, was = state.before(), shown(layer)
    AT_FIRST[write](layer)
    assert state.after(before)
    with before.put_back():
        assert shown(layer) == was


def test_what_is_written_outside_of_calls_is_no_change() -> None:
    layer = Layer()
    state = BlockState("layer", layer)
    for write in WRITES.values():
        assert not state.after(state.before())
        write(layer)


def test_an_equal_number_is_no_change() -> None:
    layer = Layer()
    layer.number = 1.5
    state = BlockState("layer", layer)
    before = state.before()
    layer.number = float("1.5")
    assert not state.after(before)


def test_a_block_without_tensors_is_remembered_once() -> None:
    state = BlockState("layer", nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    for _ in range(FIRST_CALLS + 1):
        latest = state.before()
    assert state.before() is latest


def test_what_moves_with_the_block_is_watched_and_not_copied() -> None:
    """A forward that writes it cannot be recomputed, and is refused."""
    layer = Layer()
    state = BlockState("layer", layer, [layer.buffer])
    before = state.before()
    assert id(layer.buffer) not in before.copies and not state.after(before)
    before = state.before()
    layer.buffer.add_(1)
    assert state.after(before) and not before.is_complete
