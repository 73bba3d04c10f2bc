"""Reading and writing spans of one state in the state buffers of a unit. The caller has settled the unit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ds_slide.errors import SlideError
from ds_slide.model.layout import Entry
from ds_slide.optim.reference import encode_split, join_split
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.step.phases import DEFER_HINT
from ds_slide.store.state import UnitState

MASTER = "master"


def require_stepped(runtime: SlideRuntime, unit: Unit, what: str) -> None:
    """Raise SlideError where `what` would meet the unit's next weights between backward() and step(). Raise it also
    where an exception has left weights of two steps."""
    runtime.interruptions.require_weights(what)
    require_no_update(unit, what)


def require_no_update(unit: Unit, what: str) -> None:
    """Raise SlideError where an update of the unit is under way: the first half of `require_stepped`. A caller that
    writes all weights may find weights of two steps."""
    if unit.gradient.has_sum and not unit.state.has("gradient"):
        raise SlideError(
            f"{what} between backward() and step() would meet {unit.name} after its update, which is under way "
            f"because clipping is off; call engine.step() first, or {DEFER_HINT}"
        )


def pieces(numel: int, length: int = 1 << 18) -> Iterator[slice]:
    """Cut [0, numel) into spans of at most `length` elements. encode_split works in 32-bit integers: with 2^18 elements
    a temporary has 1 MiB and stays in a core's cache."""
    return (slice(start, min(start + length, numel)) for start in range(0, numel, length))


def read_values(state: UnitState, key: str, span: slice) -> torch.Tensor:
    """Return fp32 values of `key` (MASTER or the name of a state) of the trainable elements `span`. They are on the
    device of the state buffers, in a new tensor or a view."""
    if key != MASTER:
        # A subspace has no states of single parameters (`ds_slide.checkpoint.compressed` saves its moments).
        return torch.zeros(span.stop - span.start) if state.change is not None else state.read(key, span)
    weight = state.read("weight", span)
    if not state.has("remainder"):
        return weight.float()
    remainder = state.read("remainder", span)
    return remainder if remainder.is_floating_point() else joined(weight, remainder)


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Join bf16 weights and int16 remainders."""
    masters = torch.empty_like(weight, dtype=torch.float32)
    join_split(weight, remainder, masters)
    return masters


def write_values(state: UnitState, key: str, span: slice, values: torch.Tensor) -> None:
    """Set `key` of the trainable elements `span` from flat fp32 values. MASTER sets the weights too."""
    dtype = state.dtype_of("weight")
    if key != MASTER:
        if state.change is None:  # else their own file has them (`ds_slide.checkpoint.compressed`)
            state.write(key, span, values)
    elif dtype == torch.bfloat16:
        high = torch.empty(values.numel(), dtype=torch.int16, device=values.device)
        low = torch.empty_like(high)
        for part in pieces(values.numel()):
            high[part], low[part] = encode_split(values[part])
        if state.has("remainder"):  # else the weights are the masters, rounded in the way of split masters
            state.write("remainder", span, low)
        state.write("weight", span, high.view(dtype))
    else:
        if state.has("remainder"):
            state.write("remainder", span, values)
        state.write("weight", span, values.to(dtype))


def as_weights(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round flat fp32 masters to the weights that an engine with these masters has."""
    if dtype != torch.bfloat16:
        return values.to(dtype).float()
    return torch.cat([encode_split(values[part])[0].view(dtype).float() for part in pieces(values.numel())])


def read_weights(state: UnitState, entry: Entry, start: int, stop: int) -> torch.Tensor:
    """Return the elements [start, stop) of this rank's partition in the model's dtype, in host memory. `start`: at a
    whole element of the unit."""
    first = entry.offset + entry.items(start)
    items = state.read("weight", slice(first, first + entry.items(stop - start))).cpu()
    return entry.viewed(items, stop - start)


def write_frozen(unit: Unit, entry: Entry, start: int, values: torch.Tensor) -> None:
    """Set the weights of a parameter without optimizer states, from element `start` of this rank's partition on, at a
    whole element of the unit."""
    place, dtype = entry.offset + entry.items(start), unit.state.dtype_of("weight")
    items = values.to(dtype) if entry.dtype is None else entry.stored(values, dtype)
    unit.state.write("weight", slice(place, place + items.numel()), items)


def write_weight(unit: Unit, entry: Entry, values: torch.Tensor) -> bool:
    """Set the weight from [<= partition_numel] values that a script gives. True when any bit changed.

    The master of a changed element becomes exactly the new value. An unchanged element keeps its remainder. For
    narrowed weights scripts give the masters.
    """
    state, span = unit.state, slice(entry.offset, entry.offset + entry.items(values.numel()))
    if entry.dtype is None and unit.spec.precision.narrowed and values.dtype == unit.parameter_dtype:
        return _write_master(unit, span, values.reshape(-1))
    weight = state.read("weight", span)
    new = values.reshape(-1).to(device=weight.device)
    new = new.to(weight.dtype) if entry.dtype is None else entry.stored(new, weight.dtype)
    changed = new.view(_bits(new.dtype)) != weight.view(_bits(weight.dtype))
    if not bool(changed.any()):
        return False
    if state.has("remainder") and entry.group is not None:
        own = state.read("remainder", span).clone()
        own[changed] = new[changed].float() if own.is_floating_point() else 0
        state.write("remainder", span, own)
    state.write("weight", span, new)
    return True


def _write_master(unit: Unit, span: slice, values: torch.Tensor) -> bool:
    old = read_values(unit.state, MASTER, span)
    new = values.to(old.device)
    if torch.equal(new.view(torch.int32), old.view(torch.int32)):
        return False
    write_values(unit.state, MASTER, span, new)
    return True


def _bits(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16}.get(dtype.itemsize, torch.int32)
