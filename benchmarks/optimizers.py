"""The optimizers of `step.py --optimizer`, as a user writes them: in the JSON, as an object, or on the GPU alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from settings import Setting
from torch import Tensor, nn

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
# Muon's update has singular values of 1, so its rate is far above AdamW's; DeepSpeed's defaults are 0.02 and 3e-4.
MUON_RATES = 100
# For an object of the script, DeepSpeed asks for both.
OBJECT_KEYS = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def _adam(setting: Setting) -> dict[str, Any]:
    return {"betas": list(BETAS), "eps": 1e-8, "weight_decay": WEIGHT_DECAY, **setting.optimizer_params}


def in_json(setting: Setting) -> dict[str, Any]:
    """The keys of the DeepSpeed JSON that the optimizer has."""
    if setting.optimizer == "adamw":
        return {"optimizer": {"type": "AdamW", "params": {"lr": setting.lr, **_adam(setting)}}}
    if setting.optimizer == "muon":
        rates = {"muon_lr": MUON_RATES * setting.lr, "adam_lr": setting.lr}
        return {"optimizer": {"type": "Muon", "params": {**rates, **_adam(setting)}}}
    return dict(OBJECT_KEYS)


def in_zero(setting: Setting) -> dict[str, Any]:
    """What it asks of "zero_optimization"."""
    return {"reduce_scatter": False} if setting.optimizer == "muon" else {}


def of_client(setting: Setting, parameters: Iterable[nn.Parameter | Tensor]) -> torch.optim.Optimizer | None:
    """The object that a script gives to `deepspeed.initialize`; None for an optimizer of the JSON. Adafactor has the
    rate and the options that Trainer gives it."""
    if setting.optimizer == "adafactor":
        options = {"scale_parameter": False, "relative_step": False, **setting.optimizer_params}
        return _made("transformers", "Adafactor", parameters, lr=setting.lr, **options)
    if setting.optimizer == "paged-adamw-8bit":
        return _made("bitsandbytes.optim", "PagedAdamW8bit", parameters, lr=setting.lr, **_adam(setting))
    return None


def on_gpu(setting: Setting, model: nn.Module, masters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """For `masters` of the trained parameters and their states on one device. Muon: DeepSpeed's, with its AdamW in
    plain torch."""
    if setting.optimizer == "adamw":
        return torch.optim.AdamW(masters, lr=setting.lr, fused=True, **_adam(setting))
    if setting.optimizer == "muon":
        groups = _muon_groups(setting, model, masters)
        return _made("deepspeed.runtime.zero.muon.muon_optimizer", "MuonWithAuxAdam", groups)
    optimizer = of_client(setting, masters)
    assert optimizer is not None
    return optimizer


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that DeepSpeed marks for Muon."""
    named = model.named_parameters()
    marked = ((p, p.dim() > 1 and "embed" not in name and "lm_head" not in name) for name, p in named)
    return [p for p, is_marked in marked if is_marked and p.requires_grad]


def _muon_groups(setting: Setting, model: nn.Module, masters: Sequence[Tensor]) -> list[dict[str, Any]]:
    marked, given = set(matrices_of(model)), _adam(setting)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    pairs = list(zip(trained, masters, strict=True))
    names = ("weight_decay", "momentum", "ns_method")
    muon = {name: given[name] for name in names if name in given}
    adam = {name: given[name] for name in ("betas", "eps", "weight_decay")}
    return [
        {
            "params": [own for parameter, own in pairs if parameter in marked],
            "use_muon": True,
            "lr": MUON_RATES * setting.lr,
            **muon,
        },
        {
            "params": [own for parameter, own in pairs if parameter not in marked],
            "use_muon": False,
            "lr": setting.lr,
            **adam,
        },
    ]


def _made(module: str, name: str, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    kind = getattr(importlib.import_module(module), name)
    made: torch.optim.Optimizer = kind(parameters, **options)
    return made
