"""A packed base reaches the engine's memory block by block: its bytes are never there twice.

`benchmarks/loading.py` measures the same with a checkpoint of 4.3 GB.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import safetensors.torch
import torch
from checkpoint_runs import peak_growth
from harness import ds_config, engine_for
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")
LAYERS, WIDTH, INNER = 10, 2048, 8192
BLOCK_BYTES = WIDTH * INNER
PACKED = LAYERS * BLOCK_BYTES
SLOTS = 2
LEEWAY = 40 << 20
"""Threads, tables and what they leave behind, 8 to 32 MiB by chance (`peak_growth`), and once some KiB more."""


class PackedLayer(nn.Module):
    """A frozen byte for each weight [inner, width], and a trained addition."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(256, (INNER, WIDTH), dtype=torch.uint8), requires_grad=False)
        self.added = nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = self.weight[: hidden.shape[-1]].to(hidden.dtype) / 256.0
        return hidden @ rows / WIDTH + self.added


class PackedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PackedLayer() for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.float().square().mean()


def made(where: str, folder: Path, config: dict[str, Any]) -> nn.Module:
    if where == "zero.Init":
        with deepspeed.zero.Init(config_dict_or_path=config):
            return PackedModel()
    model = PackedModel()
    if where == "files":  # as `from_pretrained` leaves weights: views of files that are mapped
        for number, layer in enumerate(model.layers):
            file = folder / f"{number}.safetensors"
            safetensors.torch.save_file({"weight": layer.weight.detach()}, file)
            layer.weight.data = safetensors.torch.load_file(file)["weight"]
    return model


@pytest.mark.parametrize(("where", "new"), [("files", PACKED), ("memory", BLOCK_BYTES), ("zero.Init", BLOCK_BYTES)])
def test_packed_bytes_are_not_in_memory_twice(where: str, new: int, tmp_path: Path) -> None:
    """`new`: bytes that are not in memory of the process before, apart from the slots of the window."""
    config = ds_config({"window": SLOTS, "gpu_states": 0, "gpu_memory": "1GiB"})
    model = made(where, tmp_path, config)
    before = [layer.weight.ds_tensor if where == "zero.Init" else layer.weight for layer in model.layers]
    sums = [each.detach().reshape(-1).sum().item() for each in before]
    del before
    with ExitStack() as engines:
        grown = peak_growth(lambda: engines.enter_context(engine_for(model, config)))
        assert grown < new + SLOTS * BLOCK_BYTES + LEEWAY < new + 0.5 * PACKED
        assert [layer.weight.ds_tensor.sum().item() for layer in model.layers] == sums
