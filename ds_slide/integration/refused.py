"""Tables of what DS-Slide refuses by name: settings with other values than some, and stock's private attributes.

A row of settings has a key of `Values` (where the check finds the setting) and the JSON path (where the user finds it).
It also has the supported values, and the two halves of the sentence that refuses other values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ds_slide.config import SlideConfig
from ds_slide.errors import SlideAttributeError, SlideError
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.rule import UpdateRule
from ds_slide.runtime.core.unit import Unit

Values = Mapping[str, Any]
"""Settings by the argument names of DeepSpeedZeroOptimizer_Stage3's constructor, plus some of the engine's own."""


NO_SUPPORT = "DS-Slide does not support it"
_NO_QUANTIZATION = "DS-Slide does not support ZeRO++"
FP32_STATES = "DS-Slide keeps master weights and moments in fp32"


@dataclass(frozen=True)
class Refused:
    """One setting. DS-Slide supports the values `allowed` only; an absent setting counts as the first of them."""

    name: str
    """Key in `Values`."""
    path: str
    """The JSON path where the user sets it."""
    why: str = NO_SUPPORT
    remedy: str = "set it to false"
    allowed: tuple[Any, ...] = (False,)


REFUSED_ENGINE_SETTINGS = (
    Refused("hybrid_engine", "hybrid_engine.enabled"),
    Refused("deepcompile", "compile.deepcompile", "its passes move the parameters that DS-Slide moves"),
    Refused("autotp_size", "tensor_parallel.autotp_size", "DS-Slide has no tensor parallelism", "set it to 0", (0, 1)),
    Refused("expert_parallel", "expert_parallel.enabled", "DS-Slide has no expert parallelism"),
    Refused("pipeline_loading_checkpoint", "zero_optimization.pipeline_loading_checkpoint"),
)

REFUSED_ZERO_SETTINGS = (
    Refused("zero_hpz_partition_size", "zero_optimization.zero_hpz_partition_size", _NO_QUANTIZATION, "use 1", (1, 0)),
    *(
        Refused(name, f"zero_optimization.{name}", _NO_QUANTIZATION)
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    Refused("mics_shard_size", "zero_optimization.mics_shard_size", remedy="remove it", allowed=(-1, 0)),
    Refused(
        "elastic_checkpoint",
        "zero_optimization.elastic_checkpoint",
        "ZeRO-3 has no elastic checkpoints",
        "set it to false and use universal checkpoints",
    ),
    Refused("prescale_gradients", "prescale_gradients"),
    Refused(
        "gradient_predivide_factor",
        "gradient_predivide_factor",
        "DS-Slide divides gradients by the world size only",
        "set it to 1.0",
        (1.0,),
    ),
    Refused("fp16_master_weights_and_gradients", "fp16.fp16_master_weights_and_grads", FP32_STATES),
    Refused("bf16_master_weights_and_gradients", "bf16.bf16_master_weights_and_grads", FP32_STATES),
    Refused("bf16_optimizer_states", "bf16.bf16_optimizer_states", FP32_STATES),
)


def setting_problems(values: Values, refused: Iterable[Refused]) -> Iterator[str]:
    """Yield a problem for each setting whose value is not allowed."""
    for setting in refused:
        value = values.get(setting.name, setting.allowed[0])
        if value not in setting.allowed:
            yield f"{setting.path} is {json.dumps(value, default=repr)}, but {setting.why}; {setting.remedy}"


# ----------------------------------------------------------------------------------------------------------------------
# Settings whose gradients cannot be compressed, refused by name.

REMOVE = "remove ds_slide.compression"


def compressed_json_problems(values: Values, slide: SlideConfig, rule: UpdateRule | None) -> Iterator[str]:
    """Yield problems of the JSON's other settings beside `ds_slide.compression`. `rule`: None where it is not known
    yet."""
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
    yield from compressed_rule_problems(slide, rule)


def compressed_rule_problems(slide: SlideConfig, rule: UpdateRule | None) -> Iterator[str]:
    if slide.compression is not None and rule not in (None, ADAMW):
        assert rule is not None
        yield f"the optimizer is {rule.name}, but compressed gradients are for AdamW; use that, or {REMOVE}"


def compressed_engine_problems(kwargs: Values, init_optimizer: Any, slide: SlideConfig) -> Iterator[str]:
    """Yield the problems that are known when the optimizer is built: the number of ranks, and whether it is AdamW."""
    if slide.compression is None:
        return
    yield from compressed_ranks_problems(
        slide, dist.get_world_size(kwargs.get("dp_process_group")) if dist.is_initialized() else 1
    )
    for index, group in enumerate(init_optimizer.param_groups):
        hyper = ADAMW.hyper_of(group, 1, init_optimizer) if {"betas", "eps"} <= set(group) else None
        if hyper is not None and not hyper.two_passes:
            yield (
                f"parameter group {index} adds the weight decay to the gradient (Adam with L2), but with compressed "
                f"gradients only AdamW's decay is exact; use AdamW, or {REMOVE}"
            )


def compressed_ranks_problems(slide: SlideConfig, ranks: int) -> Iterator[str]:
    """Yield a problem of the number of ranks."""
    if slide.compression is not None and ranks > 1 and slide.share_weights is False:
        yield (
            f"ds_slide.share_weights is false and there are {ranks} ranks, but compressed gradients are for ranks that "
            f'read each other\'s changes of weights in host memory; set it to "auto", or {REMOVE}'
        )


def require_own_layout(unit: Unit, what: str) -> None:
    """Raise SlideError where `what` of the parameters of `unit` is in a subspace, not in the parameters' own layout."""
    if unit.state.writes_change:
        raise SlideError(f"{what} of {unit.name} is in the subspace of ds_slide.compression, and no parameter's own")


# ----------------------------------------------------------------------------------------------------------------------
# Attributes of DeepSpeedZeroOptimizer_Stage3 that tools read, though they are private.
#
# Attributes that cost nothing have stock's value. The rest describe partitions, buffers and hooks that DS-Slide does
# not have: a read of one raises an error that says so, and what to use instead.

_MASTERS = (
    "the masters of all parameters are not in flat groups; use deepspeed.utils.safe_get_full_fp32_param or "
    "safe_get_local_fp32_param, and safe_set_full_fp32_param to write"
)
_WEIGHTS = "the weights are not partitioned into flat groups; use deepspeed.zero.GatheredParameters"
_GRADIENTS = (
    "gradients do not stay where backward leaves them; use deepspeed.utils.safe_get_full_grad or safe_get_local_grad "
    "between backward() and step(), and safe_set_full_grad to write"
)
_NORMS = "norms are not kept for each parameter; use engine.get_global_grad_norm()"
_SWAPPING = "states that live on SSD are DS-Slide's own; use deepspeed.utils.safe_get_full_optimizer_state"
_FETCHING = "whole blocks are fetched, in the order in which the model runs them; use ds_slide.window"

_INSTEAD = {
    _MASTERS: (
        "fp32_partitioned_groups_flat",
        "hp_params_pin_buffers",
        "next_swappable_fp32_partitioned_groups",
        "_get_fp32_opt_state_partition",
        "_set_fp32_optimizer_param_groups",
        "_unflatten_partitioned_parameters",
    ),
    _WEIGHTS: (
        "fp16_partitioned_groups",
        "fp16_partitioned_groups_flat",
        "fp16_partitioned_groups_flat_id",
        "fp16_partitioned_groups_flat_numel",
        "lp_param_buffer",
        "lp_param_contiguous_pin_buffer",
        "param_groups_fp16_flat_cpu_memory",
        "groups_padding",
        "partition_size",
    ),
    _GRADIENTS: (
        "averaged_gradients",
        "grad_partitions_flat_buffer",
        "grad_position",
        "ipg_buckets",
        "is_param_in_current_partition",
        "lp_grad_partitions_flat_pin_buffers",
        "params_already_reduced",
        "previous_reduced_grads",
        "reduce_and_partition_stream",
        "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
    ),
    _NORMS: ("norm_for_param_grads",),
    _SWAPPING: ("_swappable_optimizer_subgroup", "max_params_in_cpu"),
    _FETCHING: ("prefetch_elements", "param_coordinators"),
}
_REASONS = {name: reason for reason, names in _INSTEAD.items() for name in names}


def missing(name: str) -> SlideAttributeError:
    """Return the error for an attribute that SlideZeroOptimizer does not have."""
    reason = _REASONS.get(name)
    if reason is None:
        reason = (
            "it has none of stock ZeRO-3's private parts; use deepspeed.utils.safe_get_* and safe_set_* for states and "
            "gradients, or set ds_slide.enabled to false"
        )
    public = name.removeprefix("_DeepSpeedZeroOptimizer_Stage3")
    return SlideAttributeError(f"DS-Slide's optimizer has no attribute {public!r}: {reason}")
