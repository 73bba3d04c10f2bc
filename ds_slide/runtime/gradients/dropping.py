"""Drops the held gradients of some parameters, as `zero_grad` of a submodule does."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ds_slide.errors import SlideError
from ds_slide.model.layout import Entry
from ds_slide.runtime.core.unit import SquareSum, Unit
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.step.phases import HOLD_HINT, Event


def drop_gradients(runtime: SlideRuntime, given: Collection[int], *, to_none: bool) -> None:
    """Drop the gradients of the parameters with the `id`s `given`.

    `to_none`: if all parameters of a unit are given, the unit has no gradient afterwards, and the step leaves it
    alone. Otherwise the gradients become zero, which a step applies. SlideError where they have been applied already.
    """
    runtime.interruptions.notice()
    runtime.accumulation.require(Event.ZERO_GRAD)
    for unit in runtime.units:
        entries = [entry for parameter, entry in unit.trainable if id(parameter) in given]
        if not unit.gradient_ready or not entries:
            continue
        if not unit.state.has("gradient"):
            raise SlideError(f"the gradients cannot be discarded: the update of {unit.name} is under way; {HOLD_HINT}")
        runtime.take_back((unit,))
        if to_none and len(entries) == len(unit.trainable):
            unit.gradient_ready = False
        else:
            _zero(runtime, unit, entries)
    if not any(unit.gradient_ready for unit in runtime.units):
        runtime.accumulation.clear()


def _zero(runtime: SlideRuntime, unit: Unit, entries: Sequence[Entry]) -> None:
    if unit.state.writes_change and len(entries) < len(unit.trainable):
        raise SlideError(
            f"zero_grad of a part of {unit.name}: its gradients are compressed together (ds_slide.compression); call "
            "engine.zero_grad(), which drops those of the whole model"
        )
    runtime.settle(unit)
    runtime.parts.context.lanes.update.drain()  # an accumulation may be under way
    if len(entries) == len(unit.trainable):
        unit.state.zero_gradient()
    else:
        zero = torch.zeros(1, dtype=unit.state.dtype_of("gradient"))
        for entry in entries:
            span = slice(entry.offset, entry.offset + entry.partition_numel)
            unit.state.write("gradient", span, zero.expand(entry.partition_numel))
    unit.square_sum = SquareSum()
