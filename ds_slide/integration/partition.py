"""`parameter.ds_tensor` of an engine with DS-Slide: this rank's elements of a parameter, a view of a state buffer.

Scripts write to it as to any tensor of ZeRO-3: `parameter.ds_tensor.data = values`. An ordinary tensor would point
elsewhere from then on: the engine would train the weights that it has, and the next engine of the model would begin
with those that the script has left there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ds_slide.errors import SlideError


@dataclass(frozen=True)
class Access:
    """How the engine's weights are reached. `settle` waits until no update of them is under way."""

    settle: Callable[[], None]
    write: Callable[[torch.Tensor], None]


class Partition(torch.Tensor):
    """A tensor whose `data` can be set to values and stays where it is. What is computed from it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    ds_slide_access: Access | None = None
    """None before there is an engine."""
    ds_slide_spoiled = ""
    """Why these are no weights of a step, and whose; empty where they are. It outlives the engine."""

    @property
    def data(self) -> torch.Tensor:
        if self.ds_slide_access is not None:
            self.ds_slide_access.settle()
        plain: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return plain

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values.numel() != self.numel():
            raise SlideError(
                f"ds_tensor.data of a parameter is set to {values.numel():,} elements, but this rank has "
                f"{self.numel():,} of it; set as many, or write the whole parameter in "
                "deepspeed.zero.GatheredParameters(..., modifier_rank=0)"
            )
        if self.ds_slide_access is None:
            self.data.copy_(values.reshape(-1))
        else:
            self.ds_slide_access.write(values.reshape(-1))


def as_partition(view: torch.Tensor) -> Any:
    """Return `view` itself as a Partition, so that weak references to it stay valid."""
    view.__class__ = Partition
    return view


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor on the same memory, which stock may point elsewhere."""
    return tensor.detach()
