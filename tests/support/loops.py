"""Training loops as people write them, run on plain torch, on stock ZeRO-3 and on DS-Slide.

A loop is a function of a `Run`. It makes its models, starts an engine for each with `run.start`, and does what a script
does: `engine(x)`, `engine.backward(loss)`, `loss.backward()`, `engine.step()`, `engine.zero_grad()`, `engine.eval()`.
Plain torch answers to the same calls (`PlainEngine`), and its numbers are the right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from harness import engine_for
from torch import nn

System = Literal["plain", "stock", "slide"]
Outcome = Literal["right", "wrong", "error"]

LR = 1e-3
WIDTH = 32
TOLERANCE = 1e-3
"""Of the distance of two sets of masters over what training has moved: fp32 rounding alone."""


class Block(nn.Module):
    """A residual block of 8,416 parameters."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an input and a head. `forward(x)` returns a loss; `hidden(x)` what the blocks make."""

    def __init__(self, blocks: int = 4, width: int = WIDTH, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 8)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x)).float().pow(2).mean()


def made(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model that `build` makes after `seed`, so that all systems begin with the same weights."""
    torch.manual_seed(seed)
    return build()


def inputs(count: int = 4, batch: int = 4, width: int = WIDTH, seed: int = 1) -> list[torch.Tensor]:
    """Batches ([batch, width] each)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, width, generator=generator) for _ in range(count)]


class _PlainOptimizer:
    def __init__(self, engine: PlainEngine) -> None:
        self._engine = engine

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.module.zero_grad(set_to_none)


class PlainEngine:
    """A model in plain torch behind the calls of a DeepSpeed engine: fp32, AdamW, clipping by the global norm.

    Gradients are divided by the number of micro-batches when they are used, so each way into backward counts once.
    """

    def __init__(self, model: nn.Module, clip: float, accumulation: int) -> None:
        self.module = model
        self.optimizer = _PlainOptimizer(self)
        self._clip = clip
        self._accumulation = accumulation
        self._boundary: bool | None = None
        self._adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
        self._norm = 0.0
        self.micro_steps = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        loss.backward(retain_graph=retain_graph)
        return loss

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._accumulation == 0

    def step(self) -> None:
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        known = {id(p) for group in self._adamw.param_groups for p in group["params"]}
        later = [p for p in self.module.parameters() if id(p) not in known]
        if later:
            self._adamw.add_param_group({"params": later})
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= self._accumulation
        norm = nn.utils.clip_grad_norm_(parameters, self._clip if self._clip > 0 else float("inf"))
        self._norm = float(norm)
        self._adamw.step()
        self.module.zero_grad()

    def zero_grad(self) -> None:
        """As plain torch: what has been accumulated is dropped, but for micro-batches of a step under way."""
        if self.micro_steps % self._accumulation == 0:
            self.module.zero_grad()

    def get_global_grad_norm(self) -> float:
        return self._norm

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def eval(self) -> None:
        self.module.eval()


@dataclass
class Run:
    """One run of a loop on one system. `returned`: what the loop has returned. `masters`: fp32, by engine and name, at
    the end of the loop; `start`: when their engine was made."""

    system: System
    clip: float
    slide: Mapping[str, Any]
    returned: Any = None
    start_values: list[dict[str, torch.Tensor]] = field(default_factory=list)
    masters: list[dict[str, torch.Tensor]] = field(default_factory=list)
    _engines: list[Any] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)

    def start(
        self,
        model: nn.Module,
        *,
        accumulation: int = 1,
        slide: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        """An engine of this system. `slide`: keys of "ds_slide" beside those of the run. `arguments`: more of
        `deepspeed.initialize`'s. `more`: of the DeepSpeed config."""
        self.start_values.append({name: p.detach().clone() for name, p in model.named_parameters()})
        if self.system == "plain":
            engine: Any = PlainEngine(model, self.clip, accumulation)
        else:
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": accumulation,
                "gradient_clipping": self.clip,
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
                "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
                "steps_per_print": 10**9,
                **more,
            }
            if self.system == "slide":
                config["ds_slide"] = {"enabled": True, **self.slide, **(slide or {})}
            engine = self._stack.enter_context(engine_for(model, config, **(arguments or {})))
        self._engines.append(engine)
        return engine

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        """The whole parameter, wherever it is."""
        if not hasattr(parameter, "ds_id"):
            return parameter.detach().clone()
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def _read_masters(self) -> None:
        for engine in self._engines:
            found = {}
            for name, parameter in engine.module.named_parameters():
                master = (
                    None
                    if self.system == "plain" or not parameter.requires_grad
                    else safe_get_full_fp32_param(parameter)
                )
                found[name] = self.values(parameter).float() if master is None else master.clone()
            self.masters.append(found)


Loop = Callable[[Run], Any]


@contextmanager
def running(system: System, clip: float, slide: Mapping[str, Any]) -> Iterator[Run]:
    """A run whose engines are destroyed at the end, the newest first. Stock leaves its own `F.linear` behind, which has
    no forward mode and rounds otherwise; torch's returns."""
    run = Run(system, clip, slide)
    linear = nn.functional.linear
    try:
        with run._stack:
            yield run
    finally:
        nn.functional.linear = linear


def run_loop(loop: Loop, system: System, *, clip: float = 1.0, slide: Mapping[str, Any] | None = None) -> Run:
    """Run `loop` on `system` and read all masters."""
    with running(system, clip, {"window": 2} if slide is None else slide) as run:
        run.returned = loop(run)
        run._read_masters()
    return run


def distance(found: Run, expected: Run) -> float:
    """How far apart two runs have ended, over the way that `expected` has come."""
    apart = come = 0.0
    for ours, right, start in zip(found.masters, expected.masters, expected.start_values, strict=True):
        for name, master in right.items():
            apart += float((ours[name] - master).abs().sum())
            come += float((master - start[name].float()).abs().sum()) if name in start else 0.0
    return apart / come


def assert_right(found: Run, expected: Run, tolerance: float = TOLERANCE) -> None:
    """The masters, and what the loop has returned, are those of plain torch."""
    assert distance(found, expected) < tolerance
    if expected.returned is not None:
        torch.testing.assert_close(found.returned, expected.returned, rtol=1e-3, atol=1e-4)


def outcome(loop: Loop, system: System, *, clip: float = 1.0) -> Outcome:
    """How `loop` ends on `system`, beside plain torch."""
    expected = run_loop(loop, "plain", clip=clip)
    try:
        found = run_loop(loop, system, clip=clip)
    except Exception:
        return "error"
    try:
        assert_right(found, expected)
    except AssertionError:
        return "wrong"
    return "right"
