"""One of two ranks (gloo, CPU): runs every scenario and leaves what it saw in FOLDER/rank<N>.pt for the tests.

    python world_two_worker.py FOLDER NAME...

Every parameter has an odd number of elements, so that the second rank's partitions end in padding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import two_ranks
from adapters import Adapter, under_zero_init
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from harness import ds_config, engine_for, states_of
from torch import nn

STEPS = 4  # half of them are a whole window of two micro-batches
HIDDEN, TOKENS = 33, 257
DELAYED = {"window": 2, "debug": {"lane_delay_ms": 1.0, "seed": 3}}
GATHERED = {**DELAYED, "share_weights": False, "gpu_states": 20_000}
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
Seen = dict[str, Any]


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 65)
        self.down = nn.Linear(65, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.down(torch.relu(self.up(self.norm(hidden))))
        return out


class OddModel(nn.Module):
    """Four blocks between an embedding and a head. Its output is one in which DeepSpeed looks for no tensors."""

    def __init__(self, seed: int = 0, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(TOKENS, HIDDEN)
        self.layers = nn.ModuleList(OddBlock() for _ in range(4))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))[:, :-1].flatten(0, 1)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.float(), tokens[:, 1:].flatten()))


def freeze(model: OddModel) -> OddModel:
    model.embed.requires_grad_(False)
    model.layers[2].up.requires_grad_(False)
    return model


def adapt(model: OddModel) -> OddModel:
    """As PEFT does: fp32 adapters beside frozen weights in bf16."""
    model.bfloat16().requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = (Adapter(base, torch.float32, rank=3) for base in (layer.up, layer.down))
    return model


def adapt_and_train_more(model: OddModel) -> OddModel:
    """And a norm of every block, the embedding and the head in bf16."""
    adapt(model)
    for module in (model.embed, model.head, *(layer.norm for layer in model.layers)):
        module.requires_grad_(True)
    return model


# What differs between the trainings: the model, and arguments of `config_of`.
TRAININGS: dict[str, tuple[Callable[[int], OddModel], dict[str, Any]]] = {
    "clipping": (OddModel, {}),
    "no_clipping": (OddModel, {"clip": 0.0}),
    "frozen": (lambda seed: freeze(OddModel(seed)), {}),
    "tied": (lambda seed: OddModel(seed, tied=True), {"clip": 0.0}),
    "adapters": (lambda seed: adapt(OddModel(seed)), {}),
    "adapters_and_bf16": (lambda seed: adapt_and_train_more(OddModel(seed)), {"clip": 0.0}),
    "adapters_gathered": (lambda seed: adapt_and_train_more(OddModel(seed)), {"slide": GATHERED, "accumulation": 2}),
    "accumulation_with_gpu_states": (OddModel, {"accumulation": 2, "slide": {**DELAYED, "gpu_states": 150_000}}),
}


def config_of(*, slide: dict[str, Any] | None = DELAYED, **arguments: Any) -> dict[str, Any]:
    config = ds_config(slide, **arguments)
    config["zero_optimization"] |= GATHER
    return config


def tokens_of(rank: int, count: int) -> list[torch.Tensor]:
    """The batches of a rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return list(torch.randint(0, TOKENS, (count, 2, 24), generator=generator))


def model_of(name: str, seed: int) -> OddModel:
    """Of the training `name`. DeepSpeed leaves several data types as they are in a model made under `zero.Init`."""
    model = TRAININGS[name][0](seed)
    if name.startswith("adapters"):
        under_zero_init(model)
    return model


def train(engine: Any, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for tokens in data:
        loss = engine(tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_and_resume(name: str, folder: Path, data: list[torch.Tensor]) -> Seen:
    """Train, save half way and go on; load on another engine and do the second half again."""
    arguments = TRAININGS[name][1]
    with engine_for(model_of(name, 0), config_of(**arguments)) as engine:
        losses = train(engine, data[: STEPS // 2])
        engine.save_checkpoint(folder / name)
        half = states_of(engine.module)
        losses += train(engine, data[STEPS // 2 :])
        seen: Seen = {"losses": losses, "half": half, "states": states_of(engine.module)}
        seen["norm"] = float(engine.get_global_grad_norm())
        seen["sixteen_bit"] = engine._zero3_consolidated_16bit_state_dict()
    with engine_for(model_of(name, 7), config_of(**arguments)) as engine:
        engine.load_checkpoint(folder / name)
        seen["resumed_losses"] = train(engine, data[STEPS // 2 :])
        seen["resumed_states"] = states_of(engine.module)
    return seen


def load_on_stock(name: str, folder: Path, data: list[torch.Tensor]) -> Seen:
    with engine_for(model_of(name, 7), config_of(slide=None)) as engine:
        engine.load_checkpoint(folder / name)
        return {"states": states_of(engine.module), "losses": train(engine, data[STEPS // 2 :])}


def access(rank: int, folder: Path, data: list[torch.Tensor]) -> Seen:
    """State access and monitors; rank 0 alone modifies what `GatheredParameters` gathers."""
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(folder / f"monitor{rank}"), "job_name": "run"}}
    with engine_for(OddModel(), config_of(**monitor)) as engine:
        train(engine, data[:2])
        seen: Seen = {"before": states_of(engine.module)}
        parameters = [engine.module.layers[1].up.weight, engine.module.norm.weight, engine.module.head.weight]
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            if rank == 0:
                for parameter in parameters:
                    parameter.data.view(-1)[::2] = 0.5
        seen["gathered"] = states_of(engine.module)
        block, outer_unit = engine.module.layers[0].down.weight, engine.module.norm.bias
        for parameter in (block, outer_unit):
            safe_set_full_fp32_param(parameter, torch.full(tuple(parameter.ds_shape), 0.3))
            seen[f"set {tuple(parameter.ds_shape)}"] = safe_get_full_fp32_param(parameter).clone()
        local = safe_get_local_fp32_param(block)
        seen["local_numel"] = local.numel()
        safe_set_local_fp32_param(block, torch.full_like(local, 0.7 + rank))
        seen["set_locally"] = safe_get_full_fp32_param(block).clone()
        engine.backward(engine(data[2]).loss)
        seen["gradient"] = {name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()}
        seen["local_gradient_numel"] = safe_get_local_grad(block).numel()
        engine.step()
        seen["norm"] = float(engine.get_global_grad_norm())
        seen["later"] = train(engine, data[3:5])
        seen["states"] = states_of(engine.module)
    return seen


def astray(rank: int, data: list[torch.Tensor]) -> Seen:
    """The states when rank 1 keeps a graph of a block that rank 0 does not have, so that the block's gradient is
    complete at the end of backward there, and before on rank 0."""
    model = OddModel()
    for frozen in (model.embed, model.norm, model.head):
        frozen.requires_grad_(False)
    with engine_for(model, config_of()) as engine:
        if rank == 1:
            hidden = torch.randn(1, 4, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
            kept = engine.module.layers[2](hidden)
            assert kept.requires_grad
        train(engine, data[:1])
        return states_of(engine.module)


def main(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder) as seen:
        data = tokens_of(rank, STEPS)
        seen.update({name: train_and_resume(name, folder, data) for name in sys.argv[2:]})
        seen["stock"] = {name: load_on_stock(name, folder, data) for name in ("clipping", "adapters")}
        seen["access"] = access(rank, folder, tokens_of(rank, 5))
        seen["astray"] = astray(rank, data)


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
