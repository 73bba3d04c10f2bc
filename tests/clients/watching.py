"""What a run of Trainer leaves for a comparison."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from transformers import TrainerCallback


class Watch(TrainerCallback):
    """Keeps what was logged, and the weights at the beginning and at the end."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_step_begin(self, _args: Any, _state: Any, _control: Any, model: torch.nn.Module, **_: Any) -> None:
        self.seen.setdefault("before", _trainable(model))

    def on_train_end(self, _args: Any, state: Any, _control: Any, model: torch.nn.Module, **_: Any) -> None:
        self.seen["weights"] = _trainable(model)
        self.seen["log"] = [entry for entry in state.log_history if "loss" in entry]

    def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, optimizer: Any = None, **_: Any) -> None:
        self.seen["optimizer"] = type(getattr(optimizer, "optimizer", optimizer)).__name__


def _trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    chosen = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with deepspeed.zero.GatheredParameters(list(chosen.values())):
        return {name.removeprefix("module."): parameter.detach().clone() for name, parameter in chosen.items()}
