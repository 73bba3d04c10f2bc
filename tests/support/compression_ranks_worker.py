"""One rank of `test_compression_ranks`: trains with compressed gradients and writes what came out to a file.

python compression_ranks_worker.py FOLDER NAME...
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import two_ranks
from deepspeed.utils import safe_set_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import batches, ds_config, engine_for, llama, on_ssd, states_of, train
from permutations import between_permutations
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.integration import assemble
from ds_slide.runtime.core.ranks import sharing
from ds_slide.runtime.gradients import learning

STEPS, BLOCKS = 4, 2
# 17 x 17 and, of k and v, 16 x 16: odd, so that the parts of the ranks are padded.
LSP: dict[str, Any] = {"type": "lsp", "d": 17, "r": 2, "check_every": 2, "threshold": 0.0}
EXACT: dict[str, Any] = {"type": "lsp", "d": 64, "r": 1, "check_every": 2}
ROUNDED = LSP | {"master_dtype": "bf16"}
DELAYS = {"lane_delay_ms": 3.0, "seed": 5}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipping": ({"compression": LSP}, {"clip": 1.0}),
    "delays": ({"compression": LSP, "debug": DELAYS}, {"clip": 1.0}),
    "ssd": ({"compression": LSP, "host_memory": 0}, {"clip": 1.0}),
    "immediate": ({"compression": LSP}, {"clip": 0.0}),
    "accumulation": ({"compression": LSP}, {"clip": 1.0, "accumulation": 2}),
    "8bit": ({"compression": LSP, "state_dtype": "8bit"}, {"clip": 1.0}),
    "fp32": ({"compression": LSP}, {"clip": 1.0, "bf16": None}),
    "rounded": ({"compression": ROUNDED}, {"clip": 1.0}),
    "rounded-ssd": (
        {"compression": ROUNDED, "host_memory": 0, "debug": DELAYS, "update_passes": 2},
        {"clip": 1.0},
    ),
    "permutations": ({"compression": EXACT}, {"clip": 1.0}),
    "permutations-immediate": ({"compression": EXACT}, {"clip": 0.0}),
    "exact": ({}, {"clip": 1.0}),
    "exact-immediate": ({}, {"clip": 0.0}),
}


class Odd(nn.Module):
    """Blocks of matrices whose numbers of elements are odd. The last one is left out of two forwards of three."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(35, 67, bias=False), nn.Tanh(), nn.Linear(67, 35)) for _ in range(3)
        )
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        for layer in list(self.layers)[: 3 if self.forwards % 3 == 1 else 2]:
            x = x + layer(x)
        return x.float().square().mean()


def odd_loss(engine: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = engine(x)
    return loss


def odd_data(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 35, generator=generator).bfloat16() for _ in range(6)]


def odd_config(master_dtype: str = "auto", **slide: Any) -> dict[str, Any]:
    # Checked when all are used.
    return ds_config({"compression": LSP | {"check_every": 3, "master_dtype": master_dtype}, **slide})


def odd(seed: int, forwards: int = 0) -> Odd:
    torch.manual_seed(seed)
    model = Odd()
    model.forwards = forwards
    return model


def of_odd(rank: int, debug: dict[str, Any]) -> dict[str, Any]:
    model = odd(rank)
    with engine_for(model, odd_config(debug=debug)) as engine:
        return left_by(model, engine, train(engine, odd_data(rank), odd_loss))


def left_by(model: nn.Module, engine: Any, result: Any) -> dict[str, Any]:
    states, statistics = states_of(model, ()), engine.optimizer.slide_stats()["compression"]
    return {"losses": result.losses, "norms": result.norms, "states": states, "statistics": statistics}


def resumed(rank: int, folder: Path) -> dict[str, Any]:
    """A run, and one from its checkpoint on; then what a step with an infinite loss on one rank does."""
    data, config = batches(10)[rank::2], ds_config({"compression": LSP})
    seen: dict[str, Any] = {}
    model = llama(seed=rank, num_hidden_layers=BLOCKS)
    with engine_for(model, config) as engine:
        train(engine, data[:3])
        engine.save_checkpoint(folder)
        seen["went on"] = left_by(model, engine, train(engine, data[3:]))
    model = llama(seed=7 + rank, num_hidden_layers=BLOCKS)
    with engine_for(model, config) as engine:
        engine.load_checkpoint(folder)
        seen["resumed"] = left_by(model, engine, train(engine, data[3:]))
        engine.backward(engine(**data[0]).loss * (float("inf") if rank else 1.0))
        engine.step()
        seen["skipped"] = engine.optimizer.overflow, states_of(model, ())
    return seen


def written(rank: int, folder: Path, master_dtype: str) -> dict[str, Any]:
    """Weights that scripts have written, in every kind of file, and what loads of them. Ends with a tag that lacks the
    file of rank 1."""
    config, data, seen = odd_config(master_dtype), odd_data(rank), {}
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    model = odd(rank)
    with engine_for(model, config) as engine:
        train(engine, data[:3], odd_loss)
        one, other = model.layers[0][0].weight, model.layers[1][2].weight
        seen["value"] = torch.randn(other.ds_shape, generator=torch.Generator().manual_seed(0))
        safe_set_full_fp32_param(other, seen["value"])
        with deepspeed.zero.GatheredParameters([one], modifier_rank=0):
            if rank == 0:
                one.data.fill_(0.5)
        engine.save_checkpoint(folder)
        engine.save_16bit_model(str(folder), "weights.bin")
        seen["saved"] = states_of(model, ())
        seen["went on"] = left_by(model, engine, train(engine, data[3:], odd_loss))
    seen["fp32"] = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    seen["16 bit"] = torch.load(folder / "weights.bin")
    model = odd(7 + rank, forwards=3)
    with engine_for(model, config) as engine:
        engine.load_checkpoint(folder, load_optimizer_states=False)
        seen["weights alone"] = states_of(model, ())
        engine.load_checkpoint(folder)
        seen["resumed"] = left_by(model, engine, train(engine, data[3:], odd_loss))
        torch.distributed.barrier()
        if rank == 0:
            for name in ("ds_slide_compression_1.pt", "ds_slide_manifest.json"):
                (folder / "global_step3" / name).unlink()
        torch.distributed.barrier()
        with pytest.raises(SlideError) as lacking:
            engine.load_checkpoint(folder)
        seen["lacking"] = str(lacking.value)
    return seen


def with_little_memory(rank: int) -> list[tuple[int, int]]:
    """The elements of rounded masters, and bytes on the GPU: with "bf16"; with "auto", and on rank 1 a byte less than
    exact ones take."""
    budgets = assemble._budgets

    def begun(master_dtype: str) -> tuple[int, int]:
        with engine_for(odd(0), odd_config(master_dtype)) as engine:
            report = engine.optimizer.runtime.parts.memory_report
            return report["rounded_masters"], report["gpu_bytes"]

    (_, exact), rounded = begun("fp32"), begun("bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "_budgets", lambda *of: dataclasses.replace(budgets(*of), gpu_free=exact - rank))
        return [rounded, begun("auto")]


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(SlideError) as raised, engine_for(llama(num_hidden_layers=BLOCKS), config):
        pass
    return str(raised.value)


def main(rank: int, folder: Path) -> None:
    learning.FIT_STEPS = 1
    with two_ranks.as_rank(rank, folder) as seen:
        for name in sys.argv[2:]:
            slide, settings = RUNS[name]
            data = batches(2 * STEPS * settings.get("accumulation", 1))[rank::2]
            config = ds_config({"window": 2, **slide}, **settings)
            if name.endswith("ssd"):
                on_ssd(config, folder / "disk")
            with pytest.MonkeyPatch.context() as patch:
                if name.startswith("permutations"):
                    between_permutations(patch)
                # Every rank draws other weights: rank 0's have to win.
                model = llama(seed=rank, num_hidden_layers=BLOCKS)
                with engine_for(model, config) as engine:
                    seen[name] = left_by(model, engine, train(engine, data))
        seen["odd"], seen["odd-delays"] = of_odd(rank, {}), of_odd(rank, {"lane_delay_ms": 20.0})
        seen |= resumed(rank, folder / "checkpoints")
        seen["written"] = {kind: written(rank, folder / kind, kind) for kind in ("fp32", "bf16")}
        seen["little memory"] = with_little_memory(rank)
        refused = [refusal(ds_config({"compression": LSP, "share_weights": False}))]
        sharing.machine_identity = lambda _: f"machine {rank}"
        seen["refused"] = [*refused, refusal(ds_config({"compression": LSP}))]


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
