"""One of two ranks (gloo, CPU): reads and writes small parameters between steps, FOLDER/rank<N>.pt says what it saw.

python small_parameters_worker.py FOLDER
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import two_ranks
from deepspeed.utils import safe_get_full_fp32_param
from harness import engine_for
from torch import nn

from ds_slide.errors import SlideError

RUNS: dict[str, dict[str, Any]] = {
    "shared": {"window": 2, "debug": {"lane_delay_ms": 1.0, "seed": 5}},
    "shared-kept": {},
    "gathered": {"window": 2, "share_weights": False},
}
CLIPPING = (1.0, 0.0)
STEPS, WIDTH, LR = 4, 33, 1e-2


class OddBlock(nn.Module):
    """No parameter has an even number of elements, so that partitions end in padding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.line(self.norm(x)))
        return out


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)
        self.logit_scale = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = (self.logit_scale.exp() * self.head(x)).pow(2).mean()
        return out


def batches() -> list[torch.Tensor]:
    """For each step [2, 4, WIDTH]: the batches of both ranks."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, WIDTH, generator=generator) for _ in range(STEPS)]


def write(module: Any) -> None:
    """What all ranks do after each step."""
    with torch.no_grad():
        module.logit_scale.clamp_(0.0, 0.69)
        module.blocks[1].norm.weight.mul_(torch.linspace(0.5, 1, WIDTH))
        module.blocks[2].line.weight.data.mul_(0.9)
        module.head.bias.copy_(torch.linspace(-1, 1, 5))


def norms(module: Any) -> list[float]:
    return [float(parameter.detach().norm()) for parameter in module.parameters()]


def plain(clip: float) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Plain torch with both batches: the norms after each step, and the weights at the end."""
    model, read = OddModel(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    for _ in two_ranks.plain_steps(model, optimizer, batches(), clip):
        read.append(norms(model))
        write(model)
    return read, {name: parameter.detach() for name, parameter in model.named_parameters()}


def steps(engine: Any, rank: int) -> Iterator[None]:
    for both in batches():
        engine.backward(engine(both[rank]))
        engine.step()
        yield


def train(slide: dict[str, Any], clip: float, rank: int) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "steps_per_print": 10**9,
        "ds_slide": {"enabled": True, **slide},
    }
    read, refusals = [], []
    with engine_for(OddModel(), config) as engine:
        for _ in steps(engine, rank):
            if rank == 0:  # alone, as for a log: the other rank goes on
                try:
                    read.append(norms(engine.module))
                except SlideError as error:
                    refusals.append(str(error))
            write(engine.module)
        masters = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    return {"read": read, "refusals": refusals, "masters": masters}


def main(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder) as seen:
        for name, slide in RUNS.items():
            for clip in CLIPPING:
                seen[f"{name} {clip}"] = train(slide, clip, rank)


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
