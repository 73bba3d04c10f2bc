"""A training with GaLore on the GPU alone: a baseline of the loss that as many numbers of state can reach.

Method: "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", arXiv 2403.03507, by its authors'
package `galore-torch`. Nothing of it is offloaded, so its seconds are not those of a slow link.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

import torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR
from torch import Tensor, nn


def adamw() -> Any:
    """The package's AdamW, without what else the package imports: its 8-bit optimizer wants bitsandbytes."""
    found = importlib.util.find_spec("galore_torch")
    if found is None or found.submodule_search_locations is None:
        raise SystemExit("--systems galore needs the package galore-torch: pip install --no-deps galore-torch")
    if "galore_torch" not in sys.modules:
        package = types.ModuleType("galore_torch")
        package.__path__ = list(found.submodule_search_locations)
        sys.modules["galore_torch"] = package
    return importlib.import_module("galore_torch.adamw").AdamW


def groups_of(model: nn.Module, rank: int, gap: int) -> list[dict[str, Any]]:
    """Matrices of blocks with GaLore's keys (its scale for training from the beginning, 0.25), the rest without."""
    parameters = list(model.named_parameters())
    inside = [parameter for name, parameter in parameters if ".layers." in name and parameter.ndim == 2]
    rest = [parameter for name, parameter in parameters if ".layers." not in name or parameter.ndim != 2]
    projected = {"params": inside, "rank": rank, "update_proj_gap": gap, "scale": 0.25, "proj_type": "std"}
    return [{"params": rest}, projected]


class Trainer:
    """The calls of a DeepSpeed engine that the benchmark makes, around a model with fp32 weights and bf16 autocast."""

    def __init__(self, model: nn.Module, device: torch.device, config: dict[str, Any], rank: int, gap: int) -> None:
        self._model = model.to(device)
        self._device = device
        self._clipping = config["gradient_clipping"]
        how = dict(config["optimizer"]["params"])
        self._optimizer = adamw()(groups_of(self._model, rank, gap), **how, no_deprecation_warning=True)
        self._scheduler = WarmupCosineLR(self._optimizer, **config["scheduler"]["params"])

    def __call__(self, **batch: Tensor) -> Any:
        with torch.autocast(self._device.type, torch.bfloat16):
            return self._model(**batch)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clipping)
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)

    def train(self) -> None:
        self._model.train()

    def eval(self) -> None:
        self._model.eval()

    def destroy(self) -> None:
        """Nothing is left open."""
