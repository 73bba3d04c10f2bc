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
    if unit.gradient_ready and not runtime.held and unit.state.tier == "host":
        raise SlideError(
            f"{what} between backward() and step() would meet {unit.name} after its update, which is under way "
            f"because clipping is off; call engine.step() first, or {HOLD_HINT}"
        )


def _span(entry: Entry, numel: int | None = None) -> slice:
    return slice(entry.offset, entry.offset + (entry.partition_numel if numel is None else numel))


def _parts(numel: int) -> Iterator[slice]:
    # The conversions work in 64-bit integers: 17 GB of temporaries for a whole vocabulary matrix of 545 M parameters.
    return (slice(start, start + _CHUNK) for start in range(0, numel, _CHUNK))


def read_master(unit: Unit, entry: Entry) -> torch.Tensor:
    """fp32 master of this rank's partition: a new tensor [partition_numel] where the planes are."""
    weight, remainder = unit.state.weight[_span(entry)], unit.state.remainder
    if remainder is None or entry.group is None:
        return weight.float()
    if remainder.is_floating_point():
        return remainder[_span(entry)].clone()
    master = torch.empty_like(weight, dtype=torch.float32)
    for part in _parts(master.numel()):
        master[part] = decode_planar(weight[part].view(torch.int16), remainder[_span(entry)][part])
    return master


def write_master(unit: Unit, entry: Entry, values: torch.Tensor) -> None:
    """Set the fp32 master, and with it the weight, of this rank's partition from [<= partition_numel] values."""
    span = _span(entry, values.numel())
    weight, remainder = unit.state.weight[span], unit.state.remainder
    values = values.reshape(-1).to(device=weight.device, dtype=torch.float32)
    if remainder is None:
        weight.copy_(values)
    elif remainder.is_floating_point():
        remainder[span].copy_(values)
        weight.copy_(values)
    else:
        for part in _parts(values.numel()):
            high, low = encode_planar(values[part])
            weight[part].view(torch.int16).copy_(high)
            remainder[span][part].copy_(low)


def write_weight(unit: Unit, entry: Entry, values: torch.Tensor) -> bool:
    """Set the low-precision weight from [<= partition_numel] values; True when any bit changed.

    The master of a changed element becomes the new value exactly; an unchanged element keeps its remainder.
    """
    span = _span(entry, values.numel())
    weight, remainder = unit.state.weight[span], unit.state.remainder
    new = values.reshape(-1).to(device=weight.device, dtype=weight.dtype)
    changed = new.view(_bits(new.dtype)) != weight.view(_bits(weight.dtype))
    if not bool(changed.any()):
        return False
    weight.copy_(new)
    if remainder is not None and entry.group is not None:
        own = remainder[span]
        own[changed] = new[changed].float() if remainder.is_floating_point() else 0
    return True


def _bits(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype.itemsize == 2 else torch.int32


def read_state(unit: Unit, entry: Entry, key: str) -> torch.Tensor:
    """View of a moment of this rank's partition: [partition_numel] fp32."""
    plane: torch.Tensor = getattr(unit.state, key)
    return plane[_span(entry)]
