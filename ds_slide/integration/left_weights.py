"""The weights that an ended engine has left: in `ds_tensor` of each parameter, and nowhere else.

An engine's state buffers go with it (`ds_slide.runtime.ended`). A view of the weights stays with each parameter, so
that a script can still gather them, and so that the next engine of the model begins with them.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_slide.checkpoint import state_buffers
from ds_slide.errors import SlideError
from ds_slide.optim.reference import encode_split

LOW_HALVES = "ds_slide_low_halves"
"""Attribute of the partition of narrowed weights: what completes them to their masters, None where that is on SSD. It
outlives the engine, for the next one that takes the model over."""


def without_weights(name: str) -> SlideError:
    """The error for parameter `name`, whose weights were on an SSD tier."""
    return SlideError(
        f"parameter {name} has no weights: they were on the SSD of an engine that was destroyed; build the model "
        "again, or load it, before deepspeed.initialize"
    )


def read(partition: Any, name: str) -> torch.Tensor:
    """The elements of the partition of parameter `name`, flat; of narrowed weights their masters."""
    low: torch.Tensor | None = getattr(partition, LOW_HALVES, partition)
    if low is None:
        raise SlideError(
            f"parameter {name} has no exact weights: half of each was on the SSD of an engine that was destroyed; "
            "build the model again, or load it, before deepspeed.initialize"
        )
    if partition.ds_numel and not partition.numel():
        raise without_weights(name)
    return partition.reshape(-1) if low is partition else state_buffers.joined(partition.reshape(-1), low)


def write(partition: Any, values: torch.Tensor) -> None:
    """Set the first elements of the partition to the flat `values`."""
    weights: torch.Tensor = partition.reshape(-1)[: values.numel()]
    low: torch.Tensor | None = getattr(partition, LOW_HALVES, None)
    if low is None:
        weights.copy_(values)
        return
    high, low_halves = encode_split(values.float().cpu())
    weights.copy_(high.view(weights.dtype))
    low[: values.numel()].copy_(low_halves)
