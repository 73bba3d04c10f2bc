"""Blocks that take and return objects train as in plain torch, however many more there are than slots."""

from __future__ import annotations

import argparse
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from loops import WIDTH, Block, Run, assert_right, inputs, made, outcome, run_loop
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

pytestmark = pytest.mark.usefixtures("one_rank")

BLOCKS = 6
NamedState = namedtuple("NamedState", ["x", "edges"])


@dataclass
class State:
    x: torch.Tensor
    edges: torch.Tensor | None = None
    trail: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FrozenState:
    x: torch.Tensor
    edges: torch.Tensor


class Graph:
    """As torch_geometric's: the tensors lie in a store within the object, which answers to attributes."""

    def __init__(self, x: torch.Tensor, edges: torch.Tensor) -> None:
        self.__dict__["_store"] = UserDict(x=x, edges=edges)
        self.__dict__["_store"].parent = self  # a circle

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_store"][name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_store"][name] = value


class Layer(Block):
    """`edges` is a learned tensor that all blocks read."""

    def step(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.tanh(edges)


class DataclassLayer(Layer):
    def forward(self, state: State) -> State:
        return State(self.step(state.x, state.edges), state.edges)


class NamespaceLayer(Layer):
    def forward(self, state: argparse.Namespace) -> argparse.Namespace:
        return argparse.Namespace(x=self.step(state.x, state.edges), edges=state.edges)


class NamedTupleLayer(Layer):
    def forward(self, state: Any) -> Any:
        return NamedState(self.step(state.x, state.edges), state.edges)


class FrozenLayer(Layer):
    def forward(self, *, state: FrozenState) -> FrozenState:
        return FrozenState(self.step(state.x, state.edges), state.edges)


class GraphLayer(Layer):
    def forward(self, graph: Graph) -> Graph:
        graph.x = self.step(graph.x, graph.edges)
        return graph


class SilentLayer(Layer):
    """Changes one object that all blocks get, and returns nothing."""

    def forward(self, state: State) -> None:
        state.trail.append(state.x)
        state.x = self.step(state.x, state.edges)


class PairLayer(Layer):
    """The tensors lie in a tuple within an object within a list."""

    def forward(self, states: list[argparse.Namespace]) -> list[argparse.Namespace]:
        x, edges = states[0].pair
        return [argparse.Namespace(pair=(self.step(x, edges), edges))]


Made = Callable[[torch.Tensor, torch.Tensor], Any]
# Kind of block, how the first object is made, and how the result is read.
KINDS: dict[str, tuple[type[Layer], Made, Callable[[Any], torch.Tensor]]] = {
    "dataclass": (DataclassLayer, State, lambda state: state.x),
    "namespace": (NamespaceLayer, lambda x, edges: argparse.Namespace(x=x, edges=edges), lambda state: state.x),
    "named tuple": (NamedTupleLayer, NamedState, lambda state: state.x),
    "frozen": (FrozenLayer, FrozenState, lambda state: state.x),
    "graph": (GraphLayer, Graph, lambda graph: graph.x),
    "silent": (SilentLayer, State, lambda state: state.x + sum(each.mean() for each in state.trail)),
    "pair": (PairLayer, lambda x, edges: [argparse.Namespace(pair=(x, edges))], lambda states: states[0].pair[0]),
}


class Chain(nn.Module):
    def __init__(self, kind: str, frozen_inputs: bool = False) -> None:
        super().__init__()
        layer, self.make, self.read = KINDS[kind]
        self.inp, self.edges = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(layer() for _ in range(BLOCKS))
        if frozen_inputs:
            self.inp.requires_grad_(False)
            self.edges.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.make(self.inp(x), self.edges)
        for layer in self.layers:
            found = layer(state=state) if isinstance(layer, FrozenLayer) else layer(state)
            state = state if found is None else found
        return self.read(state).float().pow(2).mean()


class NotReentrant(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.make(self.inp(x), self.edges)
        for layer in self.layers:
            state = checkpoint(layer, state, use_reentrant=False)
        return self.read(state).float().pow(2).mean()


class Segments(Chain):
    """More blocks in one checkpoint than slots. The re-entrant form needs a tensor outside of objects."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__("dataclass")
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        edges = self.edges * 1.0

        def run(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            state = State(x, edges)
            for layer in self.layers:
                state = layer(state)
            return state.x

        return checkpoint(run, self.inp(x), edges, use_reentrant=self.use_reentrant).float().pow(2).mean()


class HfLayer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, state: State) -> State:
        return State(self.block(state.x))


class HfChain(nn.Module):
    """Layers of transformers with its checkpointing on."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(HfLayer() for _ in range(BLOCKS))
        for layer in self.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = lambda *inputs: checkpoint(*inputs, use_reentrant=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = State(self.inp(x))
        for layer in self.layers:
            state = layer(state)
        return state.x.float().pow(2).mean()


def trained(run: Run, build: Callable[[], nn.Module]) -> list[float]:
    """Two steps of two micro-batches, an evaluation between them."""
    engine = run.start(made(build), accumulation=2 if run.clip else 1)
    losses = []
    for x in inputs(4):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        engine.eval()
        with torch.no_grad():
            losses.append(float(engine(x)))
        engine.train()
    return losses


def _loop(build: Callable[[], nn.Module]) -> Callable[[Run], Any]:
    return lambda run: trained(run, build)


# Loop, and how it ends on stock.
LOOPS = {
    **{kind: (_loop(lambda kind=kind: Chain(kind)), "error" if kind == "frozen" else "right") for kind in KINDS},
    "frozen inputs": (_loop(lambda: Chain("dataclass", frozen_inputs=True)), "right"),
    "not re-entrant": (_loop(lambda: NotReentrant("dataclass")), "right"),
    "segment, not re-entrant": (_loop(lambda: Segments(False)), "right"),
    "segment, re-entrant": (_loop(lambda: Segments(True)), "right"),
    "layers of transformers": (_loop(HfChain), "right"),
}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("name", LOOPS)
def test_the_numbers_are_plain_torchs(name, clip):
    loop, _ = LOOPS[name]
    assert_right(run_loop(loop, "slide", clip=clip), run_loop(loop, "plain", clip=clip))


@pytest.mark.parametrize("name", ["dataclass", "silent", "not re-entrant"])
def test_the_default_window(name):
    loop, _ = LOOPS[name]
    assert_right(run_loop(loop, "slide", slide={}), run_loop(loop, "plain"))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", LOOPS)
def test_stock_is_as_the_table_says(name):
    loop, expected = LOOPS[name]
    assert outcome(loop, "stock") == expected


def test_an_object_holds_its_own_tensors_when_the_block_has_ended():
    """The caller's tensors lie in the object before and after, unless the block has put others there."""
    seen = []

    class Watched(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = State(self.inp(x), self.edges * 1.0)
            for layer in self.layers:
                edges, before = state.edges, state.x
                layer(state)
                seen.append((state.edges is edges, state.trail[-1] is before, state.x is before))
            return state.x.pow(2).mean()

    def loop(run: Run) -> None:
        engine = run.start(made(lambda: Watched("silent")))
        engine.backward(engine(inputs(1)[0]))

    run_loop(loop, "slide")
    # `trail` got what the block saw, an alias of the tensor.
    assert seen == [(True, False, False)] * BLOCKS


def test_gradients_leave_while_backward_runs():
    """A block's gradients are on their way when the block before it begins its backward."""
    alive = []

    class Watched(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = State(self.inp(x), self.edges)
            for layer in self.layers:
                state = layer(state)
                blocks = list(self.layers.parameters())
                state.x.register_hook(lambda _, blocks=blocks: alive.append(sum(p.grad is not None for p in blocks)))
            return state.x.pow(2).mean()

    def loop(run: Run) -> None:
        engine = run.start(made(lambda: Watched("dataclass")))
        engine.backward(engine(inputs(1)[0]))
        engine.step()

    run_loop(loop, "slide")
    assert len(alive) == BLOCKS and max(alive) == 0
