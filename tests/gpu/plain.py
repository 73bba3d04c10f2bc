"""Plain torch with the calls of an engine: fp32 masters of bf16 weights, beside which an optimizer is judged."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

RATES = {"muon_lr": 2e-3, "adam_lr": 3e-4, "weight_decay": 0.1, "eps": 1e-6}
"""Of Muon. With DeepSpeed's eps of 1e-10 the last bits of a gradient near zero would count."""


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed marks a parameter for Muon."""
    return parameter.dim() > 1 and "embed" not in name and "lm_head" not in name


def client_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """An object of the script."""
    kind: Any = {"Adafactor": torch.optim.Adafactor, "NAdam": torch.optim.NAdam}[name]
    optimizer: torch.optim.Optimizer = kind(parameters, lr=2e-3 if name == "Adafactor" else 5e-4, weight_decay=0.1)
    return optimizer


class PlainEngine:
    """The optimizer steps over all masters at once, where the model computes. Muon is DeepSpeed's own class."""

    skipped_steps = 0
    loss_scale = 1.0

    def __init__(self, model: Any, optimizer: str, clip: float) -> None:
        self.module, self.optimizer, self._clip = model, self, clip
        self._norm: torch.Tensor | None = None
        named = list(model.named_parameters())
        self._parameters = [parameter for _, parameter in named]
        self.masters = {name: nn.Parameter(parameter.detach().float().clone()) for name, parameter in named}
        if optimizer == "Muon":
            from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

            own = [(name, self.masters[name], is_matrix(name, parameter)) for name, parameter in named]
            decay = {"weight_decay": RATES["weight_decay"]}
            adam = {"lr": RATES["adam_lr"], "betas": (0.9, 0.95), "eps": RATES["eps"], **decay}
            self._own: torch.optim.Optimizer = MuonWithAuxAdam(
                [
                    {
                        "params": [p for _, p, is_one in own if is_one],
                        "use_muon": True,
                        "lr": RATES["muon_lr"],
                        **decay,
                    },
                    {"params": [p for _, p, is_one in own if not is_one], "use_muon": False, **adam},
                ]
            )
        else:
            self._own = client_optimizer(optimizer, self.masters.values())

    def __call__(self, **batch: Any) -> Any:
        return self.module(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        masters = list(self.masters.values())
        for master, parameter in zip(masters, self._parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        self._norm = nn.utils.clip_grad_norm_(masters, self._clip or float("inf"))
        self._own.step()
        with torch.no_grad():
            for master, parameter in zip(masters, self._parameters, strict=True):
                parameter.copy_(master)

    def get_global_grad_norm(self) -> torch.Tensor | None:
        return self._norm

    def destroy(self) -> None:
        """Nothing is left open."""
