"""One of two ranks of `test_inference_ranks`: a model without an optimizer, alone and beside one that is trained."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import deepspeed
import torch
import two_ranks
from harness import batches, ds_config, engine_for, llama, on_ssd, states_of

SECOND_SEED = 11
STEPS = 4
FORWARDS = {
    "shared": {"window": 2},
    "gathered": {"window": 2, "share_weights": False},
    "gathered, all fit": {"window": 9, "share_weights": False},
    "delays": {"window": 3, "debug": {"lane_delay_ms": 2.0, "seed": 5}},
    "SSD": {"window": 2, "host_memory": 0},
    "stock": None,
}
GATHERED = {"window": 2, "share_weights": False, "debug": {"lane_delay_ms": 2.0, "seed": 9}}
# Settings of the training, of the reference, clipping.
PAIRS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None, float]] = {
    "shared": ({"window": 2}, {"window": 2}, 1.0),
    "immediate": ({"window": 2}, {"window": 3}, 0.0),
    "gathered": (GATHERED, GATHERED, 1.0),
    "mixed": ({"window": 2}, GATHERED, 1.0),
    "stock": (None, None, 1.0),
}
Seen = dict[str, Any]


def forward_engine(model: Any, slide: dict[str, Any] | None, disk: Path | None = None) -> Any:
    config = ds_config(slide, optimizer=None)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if disk is not None:
        on_ssd(config, disk, "offload_param")
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    return engine


def logits_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**batch).logits
    return logits


def forwards(name: str, rank: int, folder: Path) -> Seen:
    """Every rank draws other weights: rank 0's have to win."""
    data = batches(6)[rank::2]
    engine = forward_engine(llama(seed=rank), FORWARDS[name], folder / "disk" if name == "SSD" else None)
    seen: Seen = {"logits": [logits_of(engine, batch) for batch in data]}
    saved = engine._zero3_consolidated_16bit_state_dict() or {}
    seen["saved"] = {name: tensor.clone() for name, tensor in saved.items()}  # on a CPU they are the weights themselves
    if FORWARDS[name] is not None:
        stats = engine.optimizer.slide_stats()["memory"]
        units = engine.optimizer.runtime.units
        seen["bytes"] = stats["host_state_bytes"] + stats["ssd_bytes"]
        seen["padded"] = sum(unit.layout.local_numel for unit in units)
        seen["gathered"] = {unit.is_gathered for unit in units}
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            for parameter in engine.module.parameters():
                if rank == 0:
                    parameter.data.mul_(0.5)
        seen["halved"] = logits_of(engine, data[0])
    engine.destroy()
    return seen


def pair(name: str, rank: int) -> Seen:
    """Alternating forwards of both; then each is destroyed while the other goes on."""
    ours, theirs, clip = PAIRS[name]
    data = batches(2 * STEPS)[rank::2]
    with ExitStack() as engines:
        reference = forward_engine(llama(seed=SECOND_SEED), theirs)
        engines.callback(reference.destroy)
        engine = engines.enter_context(engine_for(llama(), ds_config(ours, clip=clip)))
        losses = []
        for batch in data:
            goal = logits_of(reference, batch).float().softmax(-1)
            loss = torch.nn.functional.cross_entropy(engine(**batch).logits.float().flatten(0, 1), goal.flatten(0, 1))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        seen: Seen = {"losses": losses, "states": states_of(engine.module)}
        engine.destroy()
        seen["after"] = logits_of(reference, data[0])
    return seen


def main(rank: int, folder: Path) -> None:
    (folder / "disk").mkdir(exist_ok=True)
    with two_ranks.as_rank(rank, folder) as seen:
        seen["forwards"] = {name: forwards(name, rank, folder) for name in FORWARDS}
        seen["pairs"] = {name: pair(name, rank) for name in PAIRS}
        seen["left"] = [path.name for path in (folder / "disk").iterdir()]


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
