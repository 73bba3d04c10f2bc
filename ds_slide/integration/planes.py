"""Reads and writes one parameter's partition in the planes of its unit. The caller has settled the unit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ds_slide.errors import SlideError
from ds_slide.model.layout import Entry
from ds_slide.optim.reference import decode_planar, encode_planar
from ds_slide.runtime.engine import HOLD_HINT, SlideRuntime
from ds_slide.runtime.unit import Unit

STATE_KEYS = ("exp_avg", "exp_avg_sq")
_CHUNK = 1 << 22


def require_stepped(runtime: SlideRuntime, unit: Unit, what: str) -> None:
    """Raise SlideError where `what` would meet the unit's next weights between backward() and step()."""
    if unit.gradient_ready and not runtime.held and unit.state.tier != "gpu":
        raise SlideError(
            f"{what} between backward() and step() would meet {unit.name} after its update, which is under way "
            f"because clipping is off; call engine.step() first, or {HOLD_HINT}"
        )


def _span(entry: Entry, numel: int | None = None) -> slice:
    return slice(entry.offset, entry.offset + (entry.partition_numel if numel is None else numel))


def pieces(numel: int) -> Iterator[slice]:
    """[0, numel) in runs of which temporaries are small: the conversions work in 64-bit integers, 17 GB for a whole
    vocabulary matrix of 545 M parameters."""
    return (slice(start, min(start + _CHUNK, numel)) for start in range(0, numel, _CHUNK))


def read_master(unit: Unit, entry: Entry) -> torch.Tensor:
    """fp32 master of this rank's partition: a new tensor [partition_numel] where the planes are."""
    return read_master_part(unit, entry, 0, entry.partition_numel)


def read_master_part(unit: Unit, entry: Entry, start: int, stop: int) -> torch.Tensor:
    """The elements [start, stop) of `read_master`."""
    state, span = unit.state, slice(entry.offset + start, entry.offset + stop)
    if not state.has("remainder") or entry.group is None:
        return state.read("weight", span).float()
    remainder = state.read("remainder", span)
    if remainder.is_floating_point():
        return remainder.clone()
    weight = state.read("weight", span)
    master = torch.empty_like(weight, dtype=torch.float32)
    for part in pieces(master.numel()):
        master[part] = decode_planar(weight[part].view(torch.int16), remainder[part])
    return master


def write_master(unit: Unit, entry: Entry, values: torch.Tensor, start: int = 0) -> None:
    """Set the fp32 master, and with it the weight, of this rank's partition from element `start` on."""
    state, dtype = unit.state, unit.state.dtype_of("weight")
    span = slice(entry.offset + start, entry.offset + start + values.numel())
    values = values.reshape(-1).float()
    if not state.has("remainder") or entry.group is None:
        state.write("weight", span, values.to(dtype))
    elif state.dtype_of("remainder").is_floating_point:
        state.write("remainder", span, values)
        state.write("weight", span, values.to(dtype))
    else:
        high = torch.empty(values.numel(), dtype=torch.int16, device=values.device)
        low = torch.empty_like(high)
        for part in pieces(values.numel()):
            high[part], low[part] = encode_planar(values[part])
        state.write("weight", span, high.view(dtype))
        state.write("remainder", span, low)


def write_weight(unit: Unit, entry: Entry, values: torch.Tensor) -> bool:
    """Set the low-precision weight from [<= partition_numel] values; True when any bit changed.

    The master of a changed element becomes the new value exactly; an unchanged element keeps its remainder.
    """
    state, span = unit.state, _span(entry, values.numel())
    weight = state.read("weight", span)
    new = values.reshape(-1).to(device=weight.device, dtype=weight.dtype)
    changed = new.view(_bits(new.dtype)) != weight.view(_bits(weight.dtype))
    if not bool(changed.any()):
        return False
    if state.has("remainder") and entry.group is not None:
        own = state.read("remainder", span).clone()
        own[changed] = new[changed].float() if own.is_floating_point() else 0
        state.write("remainder", span, own)
    state.write("weight", span, new)
    return True


def _bits(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype.itemsize == 2 else torch.int32


def read_state(unit: Unit, entry: Entry, key: str) -> torch.Tensor:
    """A moment of this rank's partition: [partition_numel] fp32, a view or a copy."""
    return unit.state.read(key, _span(entry))


def write_state(unit: Unit, entry: Entry, key: str, values: torch.Tensor, start: int = 0) -> None:
    """Set a moment of this rank's partition from element `start` on."""
    span = slice(entry.offset + start, entry.offset + start + values.numel())
    unit.state.write(key, span, values.reshape(-1))
