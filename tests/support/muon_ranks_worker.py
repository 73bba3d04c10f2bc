"""One of two ranks (gloo, CPU): trains with Muon, FOLDER/rank<N>.pt says what it saw.

python muon_ranks_worker.py FOLDER
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import two_ranks
from client_ranks_worker import masters_of, train
from deepspeed.utils import safe_get_full_optimizer_state
from harness import engine_for
from moving import RandomMoves
from small_parameters_worker import OddModel, batches

from ds_slide.errors import SlideConfigError

RUNS: dict[str, tuple[dict[str, Any] | None, float]] = {
    "clipped": ({"window": 2}, 0.05),
    "clipped, gathered": ({"window": 2, "share_weights": False, "debug": {"lane_delay_ms": 1.0, "seed": 3}}, 0.05),
    "free": ({"window": 2}, 0.0),
    "by the update": ({"window": 2, "muon_norm": "update"}, 1.0),
    "clipped, on the GPU": ({"window": 2, "gpu_states": 10**7}, 0.05),
    "clipped, some on the GPU": ({"window": 2, "gpu_states": 40_000}, 0.05),
    "by the update, on the GPU": ({"window": 2, "muon_norm": "update", "gpu_states": 10**7}, 1.0),
    "stock, free": (None, 0.0),
    "stock, by the update": (None, 1.0),
}
"""The "ds_slide" block, and clipping."""


def config(slide: dict[str, Any] | None, clip: float) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_scatter": False},
        "optimizer": {
            "type": "Muon",
            "params": {"muon_lr": 0.01, "adam_lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6},
        },
        "steps_per_print": 10**9,
        **({} if slide is None else {"ds_slide": {"enabled": True, **slide}}),
    }


def states(engine: Any) -> dict[str, torch.Tensor]:
    """Masters, and the momentum of Muon's matrices."""
    momenta = {
        f"momentum of {name}": safe_get_full_optimizer_state(p, "momentum_buffer").clone()
        for name, p in engine.module.named_parameters()
        if p.use_muon
    }
    return masters_of(engine) | momenta


def run(slide: dict[str, Any] | None, clip: float, rank: int) -> dict[str, torch.Tensor]:
    with engine_for(OddModel(), config(slide, clip)) as engine:
        train(engine, rank, batches())
        return states(engine)


def moved(clip: float, rank: int) -> dict[str, torch.Tensor]:
    """Other units have their states on the GPU in every step."""
    moves = RandomMoves(2)
    with engine_for(OddModel(), config({"window": 2}, clip)) as engine:
        for batch in batches():
            moves.move(engine.optimizer.runtime)
            train(engine, rank, [batch])
        assert any(each is not None and each.promoted for each in moves.made)
        assert any(each is not None and each.demoted for each in moves.made)
        return states(engine)


def resumed(rank: int, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The states of a run, and of one that goes on from its checkpoint."""
    data, settings = batches(), config({"window": 2, "state_dtype": "bf16"}, 0.05)
    with engine_for(OddModel(), settings) as engine:
        train(engine, rank, data[:2])
        engine.save_checkpoint(folder / "saved")
        train(engine, rank, data[2:])
        expected = states(engine)
    with engine_for(OddModel(), settings) as engine:
        train(engine, rank, data[:1])
        engine.load_checkpoint(folder / "saved")
        train(engine, rank, data[2:])
        return expected, states(engine)


def refusal() -> str:
    try:
        with engine_for(OddModel(), config({"window": 2, "defer_updates": False}, 0.0)):
            return ""
    except SlideConfigError as error:
        return str(error)


def main(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder) as seen, torch.compiler.set_stance("force_eager"):
        for name, (slide, clip) in RUNS.items():
            seen[name] = run(slide, clip, rank)
        seen["moved"] = moved(RUNS["clipped"][1], rank)
        seen["resumed"] = resumed(rank, folder)
        seen["refusal"] = refusal()


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
