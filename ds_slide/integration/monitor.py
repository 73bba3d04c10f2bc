"""The sources that tools read of an engine: its log, its monitors, and stock's private attributes.

The engine reports its decisions once, and step statistics, to the log of DS-Slide and, beside DeepSpeed's own events,
to its monitors (TensorBoard, W&B, Comet, CSV).

An engine that runs DS-Slide gets its own `_take_model_step`, as an attribute of the object: the class, and with it
every engine without the key, keeps DeepSpeed's. After that method the engine has counted the step, so events have the
x value (`global_samples`) of DeepSpeed's own events, and log lines come at its interval (`steps_per_print`).
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from deepspeed.utils import z3_leaf_module
from torch import nn

from ds_slide.errors import SlideAttributeError
from ds_slide.report.log import log, no_blocks_line, size, start_line

Event = tuple[str, float, int]


def attach(engine: Any) -> None:
    """Report the start and every step of `engine`, whose optimizer is a SlideZeroOptimizer. Rank 0 writes."""
    if engine.global_rank != 0:
        return
    log_start(engine)
    take_model_step = type(engine)._take_model_step
    owner = weakref.ref(engine)  # not the engine itself, which would then own itself and outlive its last user
    reported = 0

    @functools.wraps(take_model_step)
    def _take_model_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal reported
        running: Any = owner()
        result = take_model_step(running, *args, **kwargs)
        statistics = running.optimizer.slide_stats()
        # A step that was skipped for its overflow has no statistics: the newest belong to an earlier step.
        if statistics and statistics["step"] != reported:
            reported = statistics["step"]
            _report(running, statistics)
        return result

    engine._take_model_step = _take_model_step


def log_start(engine: Any) -> None:
    """Report the decisions of `engine`, whose optimizer is ours. Rank 0 writes."""
    if engine.global_rank != 0:
        return
    parts, kernels = engine.optimizer.runtime.parts, engine.optimizer.kernels.counts
    log.info(
        start_line(
            parts.memory_report,
            ranks=parts.context.ranks.world_size,
            deferred=parts.deferred if parts.context.trains else None,
            kernels=kernels,
            shares_out=parts.spare.is_shared_out,
        )
    )
    if not parts.memory_report["blocks"]:
        log.warning(no_blocks_line(parts.memory_report))


def events_of(statistics: dict[str, Any], samples: int) -> list[Event]:
    """Return events (name, value, samples) from the dictionary of `slide_stats()`. Seconds, bytes and ratios."""
    events = [(f"Slide/{name}", float(statistics[name]), samples) for name in ("step_s", "bound_s", "efficiency")]
    for lane, totals in statistics["lanes"].items():
        events += [(f"Slide/{lane}_{name}", float(value), samples) for name, value in totals.items()]
    if statistics["ssd"]:
        for name in ("written_bytes", "written_tb_per_day"):
            events.append((f"Slide/ssd_{name}", float(statistics["ssd"][name]), samples))
    return events


def _report(engine: Any, statistics: dict[str, Any]) -> None:
    if engine.monitor.enabled:
        engine.monitor.write_events(events_of(statistics, engine.global_samples))
    interval = engine.steps_per_print()
    if interval is not None and engine.global_steps % interval == 0:
        ssd = statistics["ssd"]
        wear = f", SSD {ssd['written_tb_per_day']:.1f} TB/day written" if ssd else ""
        log.info(
            f"step={engine.global_steps}, time={statistics['step_s']:.3f} s, "
            f"bound={statistics['bound_s']:.3f} s ({statistics['bound_lane']}), "
            f"efficiency={statistics['efficiency']:.1%}{wear}{_decided(statistics)}"
        )


def _decided(statistics: dict[str, Any]) -> str:
    """Return the uses of the GPU's memory, as the end of a line."""
    memory, activations = statistics["memory"], statistics["activations"]
    said = f", {memory['gpu_units']} of {memory['units']} units updated on the GPU" if memory["gpu_units"] else ""
    if not activations.get("checkpointed"):
        return said
    said += f", activations of {activations['keep']} of {activations['checkpointed']} checkpointed blocks kept"
    said += f", of {activations['mix']} in part" if activations["mix"] else ""
    if not activations["move"]:
        return said
    on_ssd = activations.get("moved_to_ssd_bytes", 0)
    also = f" and on SSD ({size(on_ssd)})" if on_ssd else ""
    return f"{said}, inputs of {activations['move']} in host memory{also}"


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


def leaf_parameters(module: nn.Module, groups: Iterable[Iterable[nn.Parameter]]) -> dict[nn.Module, list[Any]]:
    """Return stock's attribute of that name: trainable parameters by the module that
    `deepspeed.utils.set_z3_leaf_modules` has flagged, the outermost of nested modules."""
    owner: dict[nn.Parameter, nn.Module] = {}
    for leaf in filter(z3_leaf_module, module.modules()):
        for parameter in leaf.parameters():
            owner.setdefault(parameter, leaf)
    found: dict[nn.Module, list[Any]] = defaultdict(list)
    for parameter in (parameter for group in groups for parameter in group):
        if parameter in owner:
            found[owner[parameter]].append(parameter)
    return found
