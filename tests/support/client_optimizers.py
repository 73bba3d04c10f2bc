"""Optimizers that a script brings, and plain torch's training with them: fp32 masters of bf16 weights."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from harness import Batch, Loss, Result, causal_loss, ds_config, half_up, stepped
from torch import nn

Make = Callable[[Any], torch.optim.Optimizer]
"""Parameters or parameter groups -> optimizer."""


class Counting(torch.optim.AdamW):
    """A user's AdamW: it counts its steps in itself and in its groups, and warms up by the one and decays by the
    other."""

    def __init__(self, params: Any, lr: float, warmup: int = 3) -> None:
        super().__init__(params, lr=lr, weight_decay=0.1)
        self.warmup, self.steps = warmup, 0
        self.seen = {parameter: 0 for group in self.param_groups for parameter in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        before = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            group["lr"] *= min(1.0, self.steps / self.warmup) / math.sqrt(group["done"])
            for parameter in group["params"]:
                self.seen[parameter] += 1
                if parameter.grad is not None and self.seen[parameter] % 4 == 0:
                    parameter.grad = parameter.grad.sign()  # in every fourth step
        super().step(closure)
        for group, lr in zip(self.param_groups, before, strict=True):
            group["lr"] = lr


class GlobalNorm(torch.optim.SGD):
    """Divides every gradient by the norm of all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step(closure)


class Noisy(torch.optim.SGD):
    """Adds noise of torch's own generator."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(torch.randn_like(parameter.grad))
        super().step(closure)


class Growing(torch.optim.SGD):
    """Keeps every gradient that it has had."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].setdefault("all", []).append(parameter.grad.clone())
        super().step(closure)


def _of(module: str, name: str, **options: Any) -> Make:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(importlib.import_module(module), name)(parameters, **options)  # type: ignore[no-any-return]

    return make


OURS: dict[str, Make] = {
    "NAdam": _of("torch.optim", "NAdam", lr=1e-3),
    "RAdam": _of("torch.optim", "RAdam", lr=1e-3),
    "Adagrad": _of("torch.optim", "Adagrad", lr=1e-2, initial_accumulator_value=0.1),
    "RMSprop": _of("torch.optim", "RMSprop", lr=1e-3, momentum=0.9, centered=True),
    "Adafactor": _of("torch.optim", "Adafactor", lr=1e-2),
    "Adafactor of transformers": _of("transformers", "Adafactor", relative_step=True, scale_parameter=True),
    "a subclass of AdamW": lambda parameters: Counting(parameters, lr=1e-3),
}
THEIRS: dict[str, Make] = {
    "CAME": _of("came_pytorch", "CAME", lr=2e-4),
    "lion-pytorch": _of("lion_pytorch", "Lion", lr=1e-4, weight_decay=0.1),
    "bitsandbytes AdamW": _of("bitsandbytes.optim", "AdamW", lr=1e-3),
    "bitsandbytes AdamW8bit": _of("bitsandbytes.optim", "AdamW8bit", lr=1e-3),
    "bitsandbytes PagedAdamW8bit": _of("bitsandbytes.optim", "PagedAdamW8bit", lr=1e-3),
    "torchao AdamW8bit": _of("torchao.optim", "AdamW8bit", lr=1e-3),
}
"""Of packages that are not in the environment of the tests."""
PACKAGES = {"CAME": "came_pytorch", "lion-pytorch": "lion_pytorch", "torchao AdamW8bit": "torchao"}


def config(slide: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
    """A config for an optimizer object, with the two keys that stock asks for."""
    keys = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "optimizer": None}
    return ds_config(slide, **(keys | others))


class Plain:
    """Plain torch: one optimizer over fp32 masters of all bf16 weights. Gradients are in bf16, as the engine has them,
    and their norm is taken in fp64."""

    def __init__(
        self, model: nn.Module, make: Make, clip: float, groups: Iterable[Mapping[str, Any]] | None = None
    ) -> None:
        self.model, self.clip = model, clip
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in model.named_parameters()}
        own = dict(zip(model.parameters(), self.masters.values(), strict=True))
        wanted = [{"params": list(own)}] if groups is None else groups
        self.optimizer = make([{**group, "params": [own[p] for p in group["params"]]} for group in wanted])

    def step(self) -> float:
        """Update from the gradients and clear them; -> their norm. A parameter without one is left alone."""
        parameters = dict(self.model.named_parameters())
        gradients = {name: p.grad.detach() for name, p in parameters.items() if p.grad is not None}
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        clip = max(1.0, (norm + 1e-6) / self.clip) if self.clip > 0 else 1.0
        for name, master in self.masters.items():
            master.grad = gradients[name].float() * (1.0 / clip) if name in gradients else None
        self.optimizer.step()
        for name, p in parameters.items():
            p.data.copy_(half_up(self.masters[name].detach()))
            p.grad = None
        return norm

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """In the form of `states_of`."""
        parameters = dict(self.model.named_parameters())
        return {
            name: {"weight": parameters[name].detach(), "master": master.detach()}
            for name, master in self.masters.items()
        }


def plain_training(
    model: nn.Module, make: Make, data: Sequence[Batch], clip: float, loss_of: Loss = causal_loss
) -> Result:
    """As `harness.trained`, without an engine."""
    return stepped(Plain(model, make, clip), model, data, loss_of)
