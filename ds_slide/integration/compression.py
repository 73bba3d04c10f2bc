"""Where gradients cannot be compressed, refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ds_slide.config import SlideConfig
from ds_slide.errors import SlideError
from ds_slide.integration.refused import Values
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.rule import UpdateRule
from ds_slide.runtime.unit import Unit

REMOVE = "remove ds_slide.compression"


def json_problems(values: Values, slide: SlideConfig, rule: UpdateRule | None) -> Iterator[str]:
    """What the JSON asks for beside `ds_slide.compression`. `rule`: None where it is not known yet."""
    if slide.compression is None:
        return
    if slide.compression.d == "auto":
        yield 'ds_slide.compression.d is "auto", which `ds-slide plan` replaces by a number; write that one'
    if values.get("fp16"):
        yield f"fp16.enabled is true, but compressed gradients are of weights in bf16 or fp32; use bf16, or {REMOVE}"
    if values.get("torch_autocast"):
        yield f"torch_autocast.enabled is true, but compressed gradients need weights in one dtype; {REMOVE}"
    if not values.get("managed_gradient_accumulation", True):
        yield (
            "managed_gradient_accumulation is false, but compressed gradients are checked on the last before a step, "
            f"which nothing announces then; set it to true, or {REMOVE}"
        )
    if slide.async_save:
        yield f"ds_slide.async_save is true, but compressed gradients are saved at once; turn it off, or {REMOVE}"
    yield from rule_problems(slide, rule)


def rule_problems(slide: SlideConfig, rule: UpdateRule | None) -> Iterator[str]:
    if slide.compression is not None and rule not in (None, ADAMW):
        assert rule is not None
        yield f"the optimizer is {rule.name}, but compressed gradients are for AdamW; use that, or {REMOVE}"


def engine_problems(kwargs: Values, init_optimizer: Any, slide: SlideConfig) -> Iterator[str]:
    """What is known when the optimizer is built: the number of ranks, and whether it is AdamW."""
    if slide.compression is None:
        return
    yield from ranks_problems(
        slide, dist.get_world_size(kwargs.get("dp_process_group")) if dist.is_initialized() else 1
    )
    for index, group in enumerate(init_optimizer.param_groups):
        hyper = ADAMW.hyper_of(group, 1, init_optimizer) if {"betas", "eps"} <= set(group) else None
        if hyper is not None and not hyper.two_passes:
            yield (
                f"parameter group {index} adds the weight decay to the gradient (Adam with L2), but with compressed "
                f"gradients only AdamW's decay is exact; use AdamW, or {REMOVE}"
            )


def ranks_problems(slide: SlideConfig, ranks: int) -> Iterator[str]:
    """What is known by the number of ranks."""
    if slide.compression is not None and ranks > 1 and slide.share_weights is False:
        yield (
            f"ds_slide.share_weights is false and there are {ranks} ranks, but compressed gradients are for ranks that "
            f'read each other\'s changes of weights in host memory; set it to "auto", or {REMOVE}'
        )


def require_own_layout(unit: Unit, what: str) -> None:
    """Raise SlideError where `what` of the parameters of `unit` is in a subspace, and so no parameter's own."""
    if unit.state.writes_change:
        raise SlideError(f"{what} of {unit.name} is in the subspace of ds_slide.compression, and no parameter's own")
