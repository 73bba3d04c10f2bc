"""Attributes of DeepSpeedZeroOptimizer_Stage3 that tools read, though they are private.

Those that cost nothing have the value that they would have in stock. The rest describe partitions, buffers and hooks
that DS-Slide does not have: whoever asks for one is told so, and what to use instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from deepspeed.utils import z3_leaf_module
from torch import nn

from ds_slide.errors import SlideAttributeError

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
    """The error for an attribute that SlideZeroOptimizer has not."""
    reason = _REASONS.get(name)
    if reason is None:
        reason = (
            "it has none of stock ZeRO-3's private parts; use deepspeed.utils.safe_get_* and safe_set_* for states and "
            "gradients, or set ds_slide.enabled to false"
        )
    public = name.removeprefix("_DeepSpeedZeroOptimizer_Stage3")
    return SlideAttributeError(f"DS-Slide's optimizer has no attribute {public!r}: {reason}")


def leaf_parameters(module: nn.Module, groups: Iterable[Iterable[nn.Parameter]]) -> dict[nn.Module, list[Any]]:
    """Stock's attribute of that name: trainable parameters by the module that
    `deepspeed.utils.set_z3_leaf_modules` has flagged, the outermost of nested ones."""
    owner: dict[nn.Parameter, nn.Module] = {}
    for leaf in filter(z3_leaf_module, module.modules()):
        for parameter in leaf.parameters():
            owner.setdefault(parameter, leaf)
    found: dict[nn.Module, list[Any]] = defaultdict(list)
    for parameter in (parameter for group in groups for parameter in group):
        if parameter in owner:
            found[owner[parameter]].append(parameter)
    return found
