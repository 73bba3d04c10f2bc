"""Models of several data types, as PEFT leaves them: bf16 weights made under `zero.Init`, adapters in fp32 beside them.

Only what `zero.Init` has made keeps its data type: DeepSpeed converts any other model to one, as `bf16.enabled` says.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import deepspeed
import torch
from harness import ds_config, llama, to_bf16
from torch import nn

# In every block, and outside of the blocks.
TARGETS = ("q_proj", "v_proj", "down_proj", "lm_head")
RANK = 4


class Adapter(nn.Module):
    """A linear layer with a low-rank addition, which computes in its own data type."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype, rank: int = RANK) -> None:
        super().__init__()
        self.base = base
        # Under zero.Init the base has no elements, but its sizes.
        self.down = nn.Parameter(torch.randn(rank, base.in_features).mul_(0.1).to(dtype))
        self.up = nn.Parameter(torch.randn(base.out_features, rank).mul_(0.1).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        added: torch.Tensor = x.to(self.down.dtype) @ self.down.t() @ self.up.t()
        return out + added.to(out.dtype)


def add_adapters(model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Put adapters around the TARGETS of `model`."""
    torch.manual_seed(100 + seed)
    places = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if name in TARGETS and isinstance(child, nn.Linear)
    ]
    for module, name in places:
        setattr(module, name, Adapter(getattr(module, name), dtype))
    return model


def under_zero_init(model: nn.Module) -> nn.Module:
    """Its parameters as `zero.Init` leaves them, in the data types that they have."""
    deepspeed.zero.Init(module=model, config_dict_or_path=ds_config(None))
    return model


def adapted(seed: int = 0, trained: Collection[str] = (), *, partitioned: bool = True, **options: Any) -> nn.Module:
    """A Llama in bf16 with fp32 adapters. `trained`: (parts of) names of what else trains, in bf16. `partitioned`:
    made under `zero.Init`. `options`: of the adapters."""
    model = to_bf16(llama(seed, num_hidden_layers=3))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    if partitioned:
        under_zero_init(model)
    return add_adapters(model, seed, **options)
