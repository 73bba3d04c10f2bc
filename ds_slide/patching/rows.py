"""The weight rows for a head whose weight is in host memory."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.kernels.loss.weight_rows import WeightRows

ROWS = "_slide_rows"


class HeadRows(WeightRows, Protocol):
    """The weight of a head, [v, h]."""

    @property
    def version(self) -> int:
        """The number of the weight's present generation."""


def rows_of(head: nn.Module) -> HeadRows | None:
    """Return the rows of a streamed head; None where the head has its weight."""
    rows: HeadRows | None = head.__dict__.get(ROWS)
    return rows


def weight_version(head: nn.Module) -> int:
    """Return a number that changes with every change of the head's weight.

    The read bypasses the module's own dictionary: ZeRO-3 gathers a weight that is read there in a forward. That copy of
    the matrix stayed on the GPU until the backward had ended (1.6 GB of 14 B, an untied head in host memory)."""
    if (rows := rows_of(head)) is not None:
        return rows.version
    own = dict.get(head._parameters, "weight")
    weight = head.weight if own is None else own  # a parametrization makes it from other parameters
    assert isinstance(weight, torch.Tensor)
    return weight._version


def streamed_logits(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return `hidden` [..., h] times the head's streamed weight: [..., v], with gradients."""
    rows = rows_of(head)
    assert rows is not None
    from ds_slide.kernels.loss.streamed_linear import streamed_linear

    return streamed_linear(in_dtype_of(rows, hidden), rows)


def in_dtype_of(rows: HeadRows, hidden: torch.Tensor) -> torch.Tensor:
    """Return `hidden` in autocast's data type. Raises SlideError where that is not the weight's data type."""
    device = hidden.device.type
    wanted = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if wanted != rows.dtype:
        raise SlideError(
            f"the head is streamed in {rows.dtype} and would have to compute in {wanted}: leave autocast out, or set "
            "ds_slide.stream_head to false"
        )
    return hidden.to(wanted)
