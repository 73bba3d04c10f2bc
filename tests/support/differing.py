"""Ranks whose batches use different modules, and what plain torch makes of the same batches in one process.

The reference is the mean of the ranks' gradients, where a missing one counts as zero: what DDP computes with
`find_unused_parameters`. Parameters that no rank has a gradient of are updated with zero, as with one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import vision_language as vl
from loops import LR, WIDTH, Block, Run, made, running
from torch import nn

Batch = Mapping[str, Any]


class Towers(nn.Module):
    """Vision blocks that only images use, layers that may be dropped, and experts of which a batch takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.vision = nn.ModuleList(Block() for _ in range(2))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, image: torch.Tensor | None, keep: tuple[bool, ...], expert: int) -> torch.Tensor:
        hidden = self.inp(x)
        if image is not None:
            for block in self.vision:
                image = block(image)
            hidden = hidden + self.project(image)
        for kept, layer in zip(keep, self.layers, strict=True):
            if kept:
                hidden = layer(hidden)
        hidden = self.experts[expert](hidden)
        return self.head(hidden).float().pow(2).mean()


class Forgetful(Towers):
    """Every batch goes through the vision blocks, and `forgets` what comes out, or not: then they have no gradient."""

    def forward(self, x: torch.Tensor, image: torch.Tensor, forgets: bool, **_: Any) -> torch.Tensor:
        hidden = self.inp(x)
        for block in self.vision:
            image = block(image)
        image = self.project(image)
        hidden = hidden + (image.detach() if forgets else image)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).float().pow(2).mean()


class Routed(nn.Module):
    """A block that has the experts inside."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](x)


class Mixture(nn.Module):
    """All ranks enter all blocks, with one expert of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, expert: int, **_: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, expert)
        return self.head(x).float().pow(2).mean()


ALL_LAYERS = (True,) * 4


def _random(rank: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * rank + number)


def _draw(generator: torch.Generator, most: int) -> int:
    return int(torch.randint(most, (), generator=generator))


def _batch(
    generator: torch.Generator, *, image: bool = False, keep: tuple[bool, ...] = ALL_LAYERS, expert: int = 0
) -> Batch:
    x, picture = torch.randn(2, 4, WIDTH, generator=generator)
    return {"x": x, "image": picture if image else None, "keep": keep, "expert": expert}


def images_on_one_rank(rank: int, number: int) -> Batch:
    return _batch(_random(rank, number), image=rank == number % 2)


def inputs_with_gradients(rank: int, number: int) -> Batch:
    """As PEFT makes the inputs of a frozen model: a batch without an image has a backward, in which nothing is
    trained."""
    batch = images_on_one_rank(rank, number)
    batch["x"].requires_grad_()
    return batch


def layer_drop(rank: int, number: int) -> Batch:
    generator = _random(rank, number)
    return _batch(generator, keep=tuple(bool(_draw(generator, 3)) for _ in ALL_LAYERS))


def experts(rank: int, number: int) -> Batch:
    generator = _random(rank, number)
    return _batch(generator, expert=_draw(generator, 3))


def mixture(rank: int, number: int) -> Batch:
    generator = _random(rank, number)
    keep = tuple(bool(_draw(generator, 4)) for _ in ALL_LAYERS)
    return _batch(generator, image=_draw(generator, 2) == 0, keep=keep, expert=_draw(generator, 3))


def same_modules(rank: int, number: int) -> Batch:
    return _batch(_random(rank, number), image=True, expert=number % 3)


def forgetful(rank: int, number: int) -> Batch:
    """Every third batch of one rank, or of both, gives no gradient to what the batches before have given one."""
    batch = dict(_batch(_random(rank, number), image=True))
    return batch | {"forgets": number % 3 == 2 and (rank == number % 2 or number % 5 == 0)}


def frozen(*names: str) -> Callable[[], nn.Module]:
    """Towers of which these parts are not trained."""

    def build() -> nn.Module:
        model = Towers()
        for name in names:
            model.get_submodule(name).requires_grad_(False)
        return model

    return build


@dataclass(frozen=True)
class Case:
    """A training. `batch`: of a rank, by its number and the number of the micro-batch. `slide`: keys of "ds_slide"."""

    batch: Callable[[int, int], Batch]
    build: Callable[[], nn.Module] = Towers
    clip: float = 1.0
    accumulation: int = 1
    steps: int = 4
    slide: Mapping[str, Any] = field(default_factory=dict)

    def batches(self, rank: int) -> Iterator[Batch]:
        return (self.batch(rank, number) for number in range(self.steps * self.accumulation))


def train(case: Case, rank: int, device: str = "cpu") -> Run:
    """One rank of `case` on DS-Slide."""
    with running("slide", case.clip, {"window": 2, **case.slide}) as run:
        engine = run.start(made(case.build), accumulation=case.accumulation)
        for batch in case.batches(rank):
            loss = engine(**{name: _on(device, value) for name, value in batch.items()})
            loss = loss if isinstance(loss, torch.Tensor) else loss.loss
            engine.backward(loss)
            engine.step()
        run.returned = float(engine.get_global_grad_norm())
        run._read_masters()
    return run


def _on(device: str, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def reference(case: Case, ranks: int) -> Run:
    """All ranks in this process, in plain torch."""
    run = Run("plain", case.clip, {})
    model = made(case.build)
    run.start_values.append({name: p.detach().clone() for name, p in model.named_parameters()})
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=LR, weight_decay=0.01)
    data = zip(*(case.batches(rank) for rank in range(ranks)), strict=True)
    for number, batches in enumerate(data, 1):
        for batch in batches:
            loss = model(**batch)
            loss = loss if isinstance(loss, torch.Tensor) else loss.loss
            if loss.requires_grad:
                (loss / (ranks * case.accumulation)).backward()
        if number % case.accumulation:
            continue
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        run.returned = float(nn.utils.clip_grad_norm_(trained, case.clip or float("inf")))
        adamw.step()
        model.zero_grad()
    run.masters.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return run


GATHERED = {"share_weights": False}
DELAYS = {"debug": {"lane_delay_ms": 0.3, "seed": 5}}

GRID: dict[str, Case] = {
    f"{kind.__name__}, clip {clip}, accumulation {accumulation}": Case(
        kind, clip=clip, accumulation=accumulation, slide=DELAYS
    )
    for kind in (images_on_one_rank, layer_drop, experts, mixture)
    for clip, accumulation in ((1.0, 1), (0.0, 1), (1.0, 2))
}
CASES: dict[str, Case] = {
    "default window": Case(mixture, slide={"window": "auto"}),
    "expected in vain": Case(forgetful, Forgetful, steps=9, slide=DELAYS),
    "expected in vain, clip 0.0": Case(forgetful, Forgetful, clip=0.0, steps=9, slide=DELAYS),
    "expected in vain, accumulation": Case(forgetful, Forgetful, accumulation=2, steps=9, slide=DELAYS),
    # An entry of the log has four bits of the number of its backward.
    "twenty steps": Case(mixture, steps=20),
    "vision frozen": Case(images_on_one_rank, frozen("vision")),
    "only vision trained": Case(
        inputs_with_gradients, frozen("inp", "layers", "experts", "head"), clip=0.0, slide=DELAYS
    ),
    "only vision trained, accumulation": Case(
        inputs_with_gradients, frozen("inp", "layers", "experts", "head"), accumulation=3
    ),
    "language frozen": Case(mixture, frozen("layers", "head"), accumulation=2),
    "states on the GPU": Case(mixture, slide={**DELAYS, "gpu_states": 150_000}, accumulation=2),
    "same modules, gathered": Case(same_modules, slide={**DELAYS, **GATHERED}),
    "experts inside, gathered": Case(experts, Mixture, slide={**DELAYS, **GATHERED}),
    "experts inside, gathered, clip 0.0": Case(experts, Mixture, clip=0.0, slide={**DELAYS, **GATHERED}),
    "experts inside, gathered, accumulation": Case(experts, Mixture, accumulation=2, slide={**DELAYS, **GATHERED}),
}
"""What two and three ranks run."""

VISION_LANGUAGE: dict[str, Case] = {
    "llava": Case(vl.llava_batch, vl.llava, steps=3),
    "llava, vision frozen, clip 0.0": Case(vl.llava_batch, vl.frozen(vl.llava, "vision"), clip=0.0, steps=3),
    "llava, language frozen": Case(
        vl.llava_batch, vl.frozen(vl.llava, "language_model.layers"), accumulation=2, steps=2
    ),
    "qwen3-vl": Case(vl.qwen3_vl_batch, vl.qwen3_vl, steps=3),
    "qwen3-vl, clip 0.0": Case(vl.qwen3_vl_batch, vl.qwen3_vl, clip=0.0, accumulation=1, steps=3),
    "qwen3-vl, vision frozen": Case(
        vl.qwen3_vl_batch, vl.frozen(vl.qwen3_vl, "visual.blocks"), accumulation=2, steps=2
    ),
    "mixtral": Case(vl.mixtral_batch, vl.mixtral, steps=3),
    "mixtral, gathered, clip 0.0": Case(vl.mixtral_batch, vl.mixtral, clip=0.0, steps=3, slide=GATHERED),
}
LONG = {"200 steps": Case(mixture, steps=200, slide={"debug": {"lane_delay_ms": 0.2, "seed": 7}})}
ALL = {**GRID, **CASES, **VISION_LANGUAGE, **LONG}
