"""Weights that the script made in host memory wait there for their state buffers.

Stock moves a model that was not built under `deepspeed.zero.Init` to the accelerator as a whole before it partitions
it. A model that needs offloading does not fit there: 24 GB for 12 G parameters. Only buffers belong there;
`parameters.DeepSpeedClients` reads each unit's weights where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import nn


@contextmanager
def weights_stay(engine: Any) -> Iterator[None]:
    """Let `DeepSpeedEngine._configure_distributed_model` neither move nor broadcast parameters.

    `parameters.DeepSpeedClients` broadcasts them, one at a time on the accelerator: stock would hand NCCL host memory
    here.
    """
    moves = not engine.dont_change_device
    engine.dont_change_device = True
    engine._broadcast_model = lambda: None
    try:
        yield
    finally:
        del engine._broadcast_model
        engine.dont_change_device = not moves
    # As in stock. Under zero.Init the buffers are on the accelerator already, with the parameters.
    if moves and not any(is_zero_param(parameter) for parameter in engine.module.parameters()):
        move_all_but_parameters(engine.module, engine.device)


def move_all_but_parameters(module: nn.Module, device: torch.device) -> None:
    """Move buffers, and other tensors that a module's own `_apply` moves, but no parameters and gradients."""
    gradients = {id(parameter.grad) for parameter in module.parameters()}
    moved: dict[torch.Tensor, torch.Tensor] = {}  # two modules may share one

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter) or id(tensor) in gradients:
            return tensor
        if tensor not in moved:
            moved[tensor] = tensor.to(device)
        return moved[tensor]

    module._apply(move)
