"""What the engine has decided, once, and step statistics: into the log of DS-Slide and, beside DeepSpeed's own events,
into its monitors (TensorBoard, W&B, Comet, CSV).

An engine that runs DS-Slide gets its own `_take_model_step`, as an attribute of the object: the class, and with it
every engine without the key, keeps DeepSpeed's. After that method the engine has counted the step, so events have the
x value (`global_samples`) and the log line the rhythm (`steps_per_print`) of DeepSpeed's own.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import ds_slide
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
        # A step that was skipped for its overflow has no statistics: the newest are those of an earlier one.
        if statistics and statistics["step"] != reported:
            reported = statistics["step"]
            _report(running, statistics)
        return result

    engine._take_model_step = _take_model_step


def log_start(engine: Any) -> None:
    """Report what `engine`, whose optimizer is one of ours, has decided. Rank 0 writes."""
    if engine.global_rank != 0:
        return
    parts, kernels = engine.optimizer.runtime.parts, engine.optimizer.kernels.counts
    log.info(
        start_line(
            ds_slide.__version__,
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
    """Events (name, value, samples) of the dictionary that `slide_stats()` returns. Seconds, bytes and ratios."""
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
    """What the GPU's memory is used for, as the end of a line."""
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
