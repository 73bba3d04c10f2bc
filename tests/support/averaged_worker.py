"""Ranks (gloo, CPU) of `test_averaged_in_place`: each run once as the engine does it, and once with all gradients
packed. They leave what they saw in FOLDER/rank<N>.pt.

python averaged_worker.py FOLDER RANKS NAME...
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from harness import ds_config, engine_for, states_of
from torch import nn

from ds_slide.compression.codec import Identity
from ds_slide.model import structure
from ds_slide.plan import needs
from ds_slide.runtime.core import unit as units
from ds_slide.runtime.core.ranks import collectives
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.gradients.route import Gradients
from ds_slide.runtime.gradients.sources import Averaged

STEPS, WIDTH = 4, 48  # two ranks and three divide the matrices into parts that need no padding
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "held": ({"window": 2}, {"clip": 0.05}),
    "accumulated": ({"window": 2}, {"clip": 0.05, "accumulation": 2}),
    "accumulated in fp32": (
        {"window": 2},
        {"clip": 0.05, "accumulation": 2, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    "reduced in fp32": (
        {"window": 2},
        {
            "clip": 0.05,
            "accumulation": 2,
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
        },
    ),
    "immediate": ({"window": 2}, {"clip": 0.0}),
    "on the GPU": ({"window": 2, "gpu_states": 10**7}, {"clip": 0.05, "accumulation": 2}),
    "late": ({"window": 2, "debug": {"lane_delay_ms": 2.0, "seed": 3}}, {"clip": 0.05, "accumulation": 2}),
    "unfrozen": ({"window": 2}, {"clip": 0.05}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.line(self.norm(x)))
        return out


class Net(nn.Module):
    """`inp` is larger than a block; its bias is frozen at first. Not all ranks use `extra`. Parts of `head` need
    padding."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4 * WIDTH, WIDTH)
        self.inp.bias.requires_grad_(False)
        self.extra = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5, bias=False)

    def forward(self, x: torch.Tensor, uses_extra: bool) -> torch.Tensor:
        hidden = self.inp(x)
        if uses_extra:
            hidden = hidden + self.extra(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).float().pow(2).mean()


@contextmanager
def noted(*, packs: bool) -> Iterator[dict[str, set[str]]]:
    """The units whose gradients were averaged in place, and packed. `packs`: pack them all."""
    ways: dict[str, set[str]] = {"in place": set(), "packed": set()}
    average, pack = Averaged.of, Gradients._encode_for_ranks

    def averaged(unit: Unit, *arguments: Any) -> Averaged:
        ways["in place"].add(unit.name)
        return average(unit, *arguments)

    def packed(self: Gradients, unit: Unit, staging: Any) -> None:
        ways["packed"].add(unit.name)
        pack(self, unit, staging)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Averaged, "of", averaged)
        patch.setattr(Gradients, "_encode_for_ranks", packed)
        if packs:
            for module in (needs, units):
                patch.setattr(module, "is_averaged_in_place", lambda *_: False)
            patch.setattr(Identity, "packed_itemsize", lambda self, _: self.dtype.itemsize)  # converted before
        yield ways


def run(name: str, rank: int, *, packs: bool) -> dict[str, Any]:
    slide, settings = RUNS[name]
    torch.manual_seed(0)
    model, generator = Net(), torch.Generator().manual_seed(5 + rank)
    seen: dict[str, Any] = {"losses": [], "norms": [], "written": [], "staged": []}
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    with noted(packs=packs) as seen["ways"], engine_for(model, ds_config(slide, **settings)) as engine:
        hook = model.extra.weight.register_post_accumulate_grad_hook(lambda p: held.append((p.grad, p.grad.clone())))
        for number in range(STEPS * settings.get("accumulation", 1)):
            if name == "unfrozen" and number == STEPS // 2:
                model.inp.bias.requires_grad_(True)
            x = torch.randn(2, 4 * WIDTH, generator=generator).bfloat16()
            loss = engine(x, rank == number % 3 or number % 5 == 0)
            engine.backward(loss)
            engine.step()
            seen["losses"].append(loss.item())
            seen["norms"].append(float(engine.get_global_grad_norm() or 0.0))
            seen["staged"].append(engine.optimizer.runtime.parts.gradients._stagings[0].packed.numel())
        hook.remove()
        seen["states"] = states_of(model)
    seen["held"] = len(held)
    seen["written"] = [index for index, (now, before) in enumerate(held) if not torch.equal(now, before)]
    return seen


def main(rank: int, folder: Path, world: int) -> None:
    structure.LARGE_OUTER_NUMEL = 4 * WIDTH * WIDTH  # `inp` and `extra` are units by themselves
    collectives.PIECE_BYTES = 1 << 12  # several pieces, of which the last is shorter
    with two_ranks.as_rank(rank, folder, world) as results:
        for name in sys.argv[3:]:
            results[name] = [run(name, rank, packs=packs) for packs in (False, True)]


if __name__ == "__main__":
    world = int(sys.argv[2])
    two_ranks.fork_world(world, functools.partial(main, world=world), Path(sys.argv[1]))
