"""A small model for `torch.compile`, the ways to compile it, and a count of what is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo as dynamo
from harness import ds_config, engine_for
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BLOCKS, WIDTH, TOKENS, STEPS = 5, 32, 64, 3
FP32: dict[str, Any] = {"bf16": {"enabled": False}}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm(x)).cumsum(1).tanh()
        return x + self.mlp(x)


class Net(nn.Module):
    """`reentrant`: the form of checkpointing around each block; None: none."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, TOKENS)
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


class Counting:
    """A backend of `torch.compile` that counts the graphs it gets. `blocks`: those with a whole block's cumsum."""

    def __init__(self, backend: str) -> None:
        self._compile: Callable[..., Any] = dynamo.lookup_backend(backend)
        self.graphs = self.blocks = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any, **_options: Any) -> Any:
        self.graphs += 1
        self.blocks += any("cumsum" in str(node.target) for node in graph.graph.nodes)
        return self._compile(graph, inputs)


def _compile_forward(layer: nn.Module, backend: Any) -> None:
    layer.forward = torch.compile(layer.forward, backend=backend)


def layers_of(engine: Any) -> list[Any]:
    return [module for module in engine.module.modules() if isinstance(module, Block)]


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "engine": lambda engine, backend: engine.compile(backend=backend),
    "layers": lambda engine, backend: [layer.compile(backend=backend) for layer in layers_of(engine)],
    "forwards": lambda engine, backend: [_compile_forward(layer, backend) for layer in layers_of(engine)],
    "mlps": lambda engine, backend: [layer.mlp.compile(backend=backend) for layer in layers_of(engine)],
}


@contextmanager
def no_compilation_after(limit: int = 8) -> Iterator[None]:
    """A fresh start for dynamo, and an error where one function is compiled for more than `limit` cases."""
    dynamo.reset()
    with dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        yield
    dynamo.reset()


def tokens(steps: int = STEPS, seed: int = 1, length: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(0, TOKENS, (steps, 2, length), generator=generator))


def losses(engine: Any, data: list[torch.Tensor]) -> list[float]:
    found = []
    for ids in data:
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def losses_of(
    model: nn.Module,
    slide: dict[str, Any] | None,
    way: str | None = None,
    backend: Any = None,
    data: list[torch.Tensor] | None = None,
    **config: Any,
) -> list[float]:
    """The losses of `STEPS` steps. `slide` None is stock; `way` None compiles nothing."""
    with no_compilation_after(), engine_for(model, ds_config(slide, **config)) as engine:
        if way is not None:
            WAYS[way](engine, backend)
        return losses(engine, data or tokens())
