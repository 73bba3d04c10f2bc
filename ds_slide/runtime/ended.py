"""Ends an engine: its model keeps the weights, whole or not, and all its other memory is freed.

The objects of an ended engine may live long: a script keeps the engine in a variable, accelerate keeps every engine
that it has prepared, and Python collects the reference cycles of DeepSpeed's engine late. So the memory is freed at the
end of the engine, and not with its last reference. Otherwise an engine of 50 M parameters kept 750 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ds_slide.errors import SlideError
from ds_slide.runtime.access import ENDED
from ds_slide.runtime.core import running
from ds_slide.runtime.core.lanes import Lanes
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.parts import Parts
from ds_slide.store.in_memory import InMemory

if TYPE_CHECKING:
    from ds_slide.runtime.engine import SlideRuntime


def end(runtime: SlideRuntime) -> None:
    """Run the queued work, end the threads, remove the hooks. Harmless when called twice."""
    parts, access = runtime.parts, runtime.access
    context = parts.context
    running.leave(runtime)
    runtime.taking.leave()
    if not access.has_ended:
        access.spoiled = access.why_spoiled()
    # The model keeps its weights as they are after the last confirmed update.
    runtime.hooks.detach()
    with suppress(SlideError):  # the failure of a lane, which has been reported
        access.take_back(runtime.units)
    runtime.parked.forget()
    if runtime.rows is not None:
        runtime.rows.close()
    runtime.resident_weights.unbind_all()
    why = context.failures.message
    try:
        with context.failures.waiting("the engine to end"):
            parts.spare.activations.close()
            _close_lanes(parts)
            context.device.synchronize()
            for pool in context.allocator.pools.values():
                pool.close()
            context.recorder.close()
    finally:
        # A later call of this engine would wait for lanes that have ended.
        context.failures.end(ENDED)
        if parts.watchdog is not None:
            parts.watchdog.close(why)
        if not access.has_ended:
            access.has_ended = True
            access.spoiled = access.spoiled or _why_incomplete(runtime.units)
            _free_memory(parts)


def _why_incomplete(units: Sequence[Unit]) -> str:
    """Return which update of weights in memory has not run, after the lanes have ended; empty where all have run."""
    for unit in units:
        if unit.state.weights.buffer.tensor is not None and not unit.updated.is_complete:
            return f"it ended before the update of {unit.name} was done"
    return ""


def _close_lanes(parts: Parts) -> None:
    """End the lanes in the order of the flow of work, so that nothing queued is lost."""
    lanes, ssd, shared, failures = parts.context.lanes, parts.ssd, parts.context.shared, parts.context.failures
    if ssd is None:
        lanes.d2h.close()
        _close_updates(lanes)
    else:
        with ssd.weights.hurry():
            lanes.d2h.close()
        # The files on SSD end with the run, so updates that have not begun are not needed. The h2d lanes may wait for
        # them.
        ssd.abandon()
        _close_updates(lanes)
        failures.record("runtime", SlideError("the engine was destroyed"))
    if shared is not None:
        # This also ends waits for other ranks. The other ranks have all of this rank's updates by now.
        failures.record("runtime", SlideError("the engine was destroyed"))
        shared.close()
    lanes.h2d.close()
    lanes.outer_h2d.close()
    if ssd is not None:
        ssd.close()


def _close_updates(lanes: Lanes) -> None:
    lanes.update.close()
    lanes.products.close()
    lanes.matrices_d2h.close()


def _free_memory(parts: Parts) -> None:
    """Free states, gradients and buffers. The parameters keep the memory of the weights, because they have views of
    it."""
    for unit in parts.units:
        unit.way_back = unit.home = unit.resident = unit.gradient.gpu_sum = None
        for buffer in unit.state.buffers.values():
            if isinstance(buffer, InMemory):
                buffer.tensor = buffer.tensor.new_empty(0)
    if parts.window is not None:
        parts.window.refit((), 0, ())
    parts.gradients.free_buffers()
    parts.updating.close()
    parts.context.memory.forget()
    if parts.context.shared is not None:
        parts.context.shared.parts.clear()
