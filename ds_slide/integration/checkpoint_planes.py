"""Parts of a unit's states as a checkpoint has them: fp32 masters and moments, in host memory.

The caller has settled the unit.
"""

from __future__ import annotations

import torch

from ds_slide.model.layout import Entry
from ds_slide.optim.reference import encode_planar
from ds_slide.runtime.unit import Unit

MASTER = "master"
KEYS = (MASTER, "exp_avg", "exp_avg_sq")
# encode_planar works in 64-bit integers: 2 MiB a temporary, which stays in a core's cache.
_CHUNK = 1 << 18


def read_values(unit: Unit, key: str, span: slice) -> torch.Tensor:
    """fp32 values of `key` (one of KEYS) of the local elements `span`: host memory, perhaps the plane itself."""
    if key != MASTER:
        return unit.state.read(key, span).cpu()
    weight = unit.state.read("weight", span).cpu()
    if not unit.state.has("remainder"):
        return weight.float()
    remainder = unit.state.read("remainder", span).cpu()
    if remainder.is_floating_point():
        return remainder
    return joined(weight, remainder)


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """`decode_planar` of bf16 and int16 in 32-bit arithmetic, which is 6 times faster and wraps where it has to."""
    bits = torch.empty(weight.numel(), dtype=torch.int32)
    for part, high, low in zip(*(tensor.split(_CHUNK) for tensor in (bits, weight, remainder)), strict=True):
        part.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(low)
    return bits.view(torch.float32)


def write_values(unit: Unit, key: str, span: slice, values: torch.Tensor) -> None:
    """Set `key` of the local elements `span` from fp32 host values; masters set the weights too."""
    if key != MASTER:
        unit.state.write(key, span, values)
        return
    dtype = _dtype(unit)
    if not unit.state.has("remainder"):
        unit.state.write("weight", span, values.to(dtype))
        return
    if dtype != torch.bfloat16:
        unit.state.write("remainder", span, values)
        unit.state.write("weight", span, values.to(dtype))
        return
    high, low = (torch.empty(values.numel(), dtype=torch.int16) for _ in range(2))
    for part in range(0, values.numel(), _CHUNK):
        end = part + _CHUNK
        high[part:end], low[part:end] = encode_planar(values[part:end])
    unit.state.write("remainder", span, low)
    unit.state.write("weight", span, high.view(torch.bfloat16))


def read_weights(unit: Unit, entry: Entry, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of this rank's partition in the model's dtype, in host memory."""
    return unit.state.read("weight", slice(entry.offset + start, entry.offset + stop)).cpu()


def write_frozen(unit: Unit, entry: Entry, start: int, values: torch.Tensor) -> None:
    """Set the weights of a parameter without optimizer states from element `start` of this rank's partition."""
    place = entry.offset + start
    unit.state.write("weight", slice(place, place + values.numel()), values.to(_dtype(unit)))


def _dtype(unit: Unit) -> torch.dtype:
    return unit.parameters[0].dtype
