"""The methods that an engine with DS-Slide has instead of DeepSpeed's: `zero_grad`, `backward` with its prologue, and
`_take_model_step`, which reports each step.

They are attributes of the object: the class, and with it every engine without the key, keeps DeepSpeed's. The methods
for checkpoints are in `checkpoint_load` and `checkpoint_save`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ds_slide.integration.external_parameters import ExternalParameters
from ds_slide.integration.throughput import measure_by_events
from ds_slide.plan.bound import bound_of
from ds_slide.plan.host_room import local_ranks
from ds_slide.plan.kept_ceilings import kept_ceilings
from ds_slide.report import compilations
from ds_slide.report.log import log, no_blocks_line, size, start_line
from ds_slide.runtime.core.calls import NO_TASK, graph_task
from ds_slide.runtime.parts import Parts

Event = tuple[str, float, int]


def attach(engine: Any) -> None:
    """Give `engine`, whose optimizer is a SlideZeroOptimizer, these methods, and the client's optimizer its
    `zero_grad`. Modules get theirs from `ownership`."""
    if engine.global_rank == 0:
        log_start(engine)
        override(engine, _take_model_step)
    # Not the engine itself, which would then own itself.
    engine.optimizer.engine = reference = weakref.ref(engine)
    override(engine, zero_grad)
    client = engine.optimizer.optimizer
    client.zero_grad = _ClientZeroGrad(reference, type(client).zero_grad, weakref.ref(client))
    engine._backward_prologue = engine.optimizer.runtime.prologue = _Prologue(reference)
    engine._backward_prologue_per_tensor = _unchanged
    override(engine, backward)
    measure_by_events(engine)
    ExternalParameters(engine)


def override(engine: Any, function: Callable[..., Any]) -> None:
    """Give the object `engine` a method that calls `function(engine, ...)`, in place of the method of that name."""
    owner = weakref.ref(engine)  # not the engine itself, which would then own itself and outlive its last user

    @functools.wraps(getattr(type(engine), function.__name__))
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(owner(), *args, **kwargs)

    setattr(engine, function.__name__, method)


def detach(client: Any) -> None:
    """Give the client's optimizer its own `zero_grad` back."""
    if isinstance(vars(client).get("zero_grad"), _ClientZeroGrad):
        del client.zero_grad


# ----------------------------------------------------------------------------------------------------------------------
# Every `zero_grad` drops the gradients that DS-Slide holds, as in plain torch.
#
# `parameter.grad` is empty after a backward, because its gradient waits elsewhere for the step. So `engine.zero_grad()`
# and `zero_grad` of the model, a wrapper, a submodule or the client's optimizer drop the waiting gradients.
# Micro-batches of an accumulation under way stay: scripts call `engine.zero_grad()` before each of them, and DeepSpeed
# keeps them.


def zero_grad(engine: Any) -> None:
    """`engine.zero_grad()`."""
    for parameter in engine.module.parameters():
        parameter.grad = None
    drop_all(engine)


class _ClientZeroGrad:
    """`zero_grad` of the optimizer that was given to `deepspeed.initialize`, whose groups DeepSpeed has emptied."""

    def __init__(self, engine: weakref.ref[Any], original: Any, client: weakref.ref[Any]) -> None:
        self._engine, self._original, self._client = engine, original, client

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._original(self._client(), *args, **kwargs)
        if (engine := self._engine()) is not None:
            drop_all(engine)


def drop_all(engine: Any) -> None:
    """Drop all gradients since the last step, except micro-batches of an accumulation under way. A sum that an
    exception has spoilt is dropped, too; the step then begins with its first micro-batch. SlideError where weights have
    been updated from these gradients."""
    if engine.optimizer.runtime.interruptions.has_lost_gradients():
        engine.optimizer.zero_grad()
        _restart(engine)
    elif not _is_accumulating(engine):
        engine.optimizer.zero_grad()


def _is_accumulating(engine: Any) -> bool:
    accumulation = engine.optimizer.runtime.accumulation
    if not accumulation.micro_batches:
        return False
    if engine.managed_gradient_accumulation() and engine._is_gradient_accumulation_boundary is None:
        # A backward without an engine.step() after it, as in an evaluation, is no micro-batch of the accumulation.
        return bool(engine.micro_steps % engine.gradient_accumulation_steps())
    return not accumulation.ended_at_boundary


def _restart(engine: Any) -> None:
    """Count the micro-batches of a step from the first one, where the script does not count them itself."""
    if not engine.managed_gradient_accumulation():
        engine._unmanaged_backward_count = 0
    elif engine._is_gradient_accumulation_boundary is None:
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()


def drop_some(engine: Any, parameters: Sequence[nn.Parameter], *, set_to_none: bool) -> None:
    """Drop the gradients of some of the model's parameters in the same way."""
    runtime = engine.optimizer.runtime
    given = {id(parameter) for parameter in parameters}
    if all(id(parameter) in given for unit in runtime.units for parameter, _ in unit.trainable):
        drop_all(engine)
    elif not _is_accumulating(engine):
        runtime.access.drop_gradients(given, to_none=set_to_none)


# ----------------------------------------------------------------------------------------------------------------------
# DeepSpeed's prologue of a backward, and its division by the number of micro-batches, for each output of the model.
#
# DeepSpeed puts both on the outputs of `engine.forward`, only in tuples, lists and dictionaries, and calls the prologue
# for the first backward of a forward only. Here the runtime's hooks on the outputs do both. They also work in
# dataclasses, after `engine.module(x)`, and in each further backward of one forward.


def _unchanged(gradient: torch.Tensor) -> torch.Tensor:
    """Return `gradient`. DeepSpeed's hook on an output calls this, but the runtime's hook on the output divides."""
    return gradient


class _Prologue:
    """DeepSpeed's prologue, once in each backward."""

    def __init__(self, engine: weakref.ref[Any]) -> None:
        self._engine = engine
        self._task = NO_TASK

    def __call__(self) -> None:
        task = graph_task()
        if task == self._task != NO_TASK:
            return
        engine: Any = self._engine()
        type(engine)._backward_prologue(engine)
        self._task = task

    def on_output_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Begin the backward, and divide `gradient` where the script has not called `engine.backward`."""
        self()
        engine: Any = self._engine()
        divided: torch.Tensor = type(engine)._backward_prologue_per_tensor(engine, gradient)
        return divided


def backward(engine: Any, *args: Any, **kwargs: Any) -> Any:
    """`engine.backward`: an operator that finds no GPU memory runs again (`ds_slide.runtime.memory.shortage`).

    `loss.backward()` of a script is noticed only when its backward has begun, which is too late.
    """
    with engine.optimizer.runtime.parts.spare.around_backward():
        return type(engine).backward(engine, *args, **kwargs)


# ----------------------------------------------------------------------------------------------------------------------
# The report of an engine: its decisions once, and statistics of every step, to the log of DS-Slide and, beside
# DeepSpeed's own events, to DeepSpeed's monitors (TensorBoard, W&B, Comet, CSV). Rank 0 writes.
#
# After `_take_model_step` the engine has counted the step, so events have the x value (`global_samples`) of DeepSpeed's
# own events, and log lines come at its interval (`steps_per_print`).


def _take_model_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
    result = type(engine)._take_model_step(engine, *args, **kwargs)
    compilations.watch().tell()
    statistics = engine.optimizer.slide_stats()
    # A step that was skipped for its overflow has no statistics: the newest belong to an earlier step.
    if statistics and statistics["step"] != engine.optimizer.reported_step:
        engine.optimizer.reported_step = statistics["step"]
        _report(engine, statistics)
    return result


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
            shares_out=parts.spare.room.budget.exists,
            bound=_bound(parts, engine.gradient_accumulation_steps()),
        )
    )
    if not parts.memory_report["blocks"]:
        log.warning(no_blocks_line(parts.memory_report))


def _bound(parts: Parts, micro_batches: int) -> str:
    """Return the clause about the lane that bounds a step, by what `ds-slide doctor` has measured on this machine. ""
    without updates by the engine's own kernels."""
    settings, ranks = parts.context.settings, local_ranks()
    if not settings.by_elements:
        return ""
    ceilings = kept_ceilings()
    if ceilings is None:
        return "" if ranks == 1 else f"`ds-slide doctor` has not measured what {ranks} ranks share here"
    disks = [] if settings.ssd is None else [path for _, path in settings.ssd.parents]
    on_gpu = parts.context.device.is_cuda
    found = bound_of(parts.plan, ceilings, ranks, on_gpu=on_gpu, micro_batches=micro_batches, disks=disks)
    return "" if found is None else str(found)


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
    # accelerate sets an infinite interval. Step 10 is the first one behind the decisions about spare memory.
    if engine.global_steps == 10 or (interval is not None and engine.global_steps % interval == 0):
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
