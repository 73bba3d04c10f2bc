"""A model whose engine has ended: its weights are partitioned, and a forward of it has nothing to compute with.

It may be computed with while a script has gathered its parameters, and as soon as another engine has it.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from ds_slide.errors import SlideError


def refuse_forwards(module: nn.Module) -> None:
    """Give each module in `module` that has parameters of its own a sentence in the place of torch's error of sizes."""
    for child in module.modules():
        if any(True for _ in child.parameters(recurse=False)):
            child.register_forward_pre_hook(_require_weights)


def allow_forwards(module: nn.Module) -> None:
    """An engine has the model."""
    for child in module.modules():
        for number in [number for number, hook in child._forward_pre_hooks.items() if hook is _require_weights]:
            del child._forward_pre_hooks[number]


def _require_weights(module: nn.Module, _args: Any) -> None:
    for name, each in module.named_parameters(recurse=False):
        parameter: Any = each
        if getattr(parameter, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE:
            raise SlideError(
                f"a forward of a {type(module).__name__} whose {name} is not here, because the engine of the model has "
                "ended, by destroy(); give the model to deepspeed.initialize again, or compute with it in "
                "deepspeed.zero.GatheredParameters(model.parameters())"
            )
