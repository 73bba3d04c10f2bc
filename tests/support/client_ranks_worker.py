"""One of two ranks (gloo, CPU): trains with optimizers of the script, FOLDER/rank<N>.pt says what it saw.

python client_ranks_worker.py FOLDER
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import two_ranks
from client_optimizers import OURS
from deepspeed.utils import safe_get_full_fp32_param
from harness import engine_for
from small_parameters_worker import OddModel, batches

from ds_slide.errors import SlideConfigError

RUNS: dict[str, tuple[str, dict[str, Any] | None, float]] = {
    "NAdam": ("NAdam", {"window": 2}, 1.0),
    "NAdam gathered": ("NAdam", {"window": 2, "share_weights": False}, 0.0),
    "a subclass": ("a subclass of AdamW", {"window": 2, "debug": {"lane_delay_ms": 1.0, "seed": 3}}, 1.0),
    "stock NAdam": ("NAdam", None, 1.0),
}
"""Optimizer, "ds_slide" block, clipping."""


def config(slide: dict[str, Any] | None, clip: float) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **({} if slide is None else {"ds_slide": {"enabled": True, **slide}}),
    }


def plain(name: str, clip: float) -> dict[str, torch.Tensor]:
    """Plain torch with both batches: the weights at the end."""
    model = OddModel()
    for _ in two_ranks.plain_steps(model, OURS[name](model.parameters()), batches(), clip):
        pass
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def masters_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def train(engine: Any, rank: int, data: list[torch.Tensor]) -> None:
    for both in data:
        engine.backward(engine(both[rank]))
        engine.step()


def run(name: str, slide: dict[str, Any] | None, clip: float, rank: int) -> dict[str, torch.Tensor]:
    model = OddModel()
    with engine_for(model, config(slide, clip), optimizer=OURS[name](model.parameters())) as engine:
        train(engine, rank, batches())
        return masters_of(engine)


def resumed(rank: int, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The masters of a run, and of one that goes on from its checkpoint."""
    data, make, settings = batches(), OURS["a subclass of AdamW"], config({"window": 2}, 1.0)
    model = OddModel()
    with engine_for(model, settings, optimizer=make(model.parameters())) as engine:
        train(engine, rank, data[:2])
        engine.save_checkpoint(folder / "saved")
        train(engine, rank, data[2:])
        expected = masters_of(engine)
    model = OddModel()
    with engine_for(model, settings, optimizer=make(model.parameters())) as engine:
        train(engine, rank, data[:1])
        engine.load_checkpoint(folder / "saved")
        train(engine, rank, data[2:])
        return expected, masters_of(engine)


def refusal() -> str:
    model = OddModel()
    try:
        with engine_for(model, config({"window": 2}, 1.0), optimizer=OURS["Adafactor"](model.parameters())):
            return ""
    except SlideConfigError as error:
        return str(error)


def main(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder) as seen:
        for name, (optimizer, slide, clip) in RUNS.items():
            seen[name] = run(optimizer, slide, clip, rank)
        seen["resumed"] = resumed(rank, folder)
        seen["refusal"] = refusal()
        seen["flat"] = run("Adafactor", {"window": 2, "flat_pieces": True}, 1.0, rank)


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
