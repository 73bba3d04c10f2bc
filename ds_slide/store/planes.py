"""The planes of a unit: flat arrays that hold one state of all its parameters, and what an update needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_slide.optim.low_precision import StateFormat

REMAINDER_DTYPE = {torch.bfloat16: torch.int16, torch.float16: torch.float32, torch.float32: None}
"""Of the plane that completes a weight to its fp32 master, by the weight's dtype."""


@dataclass(frozen=True)
class PlaneSpec:
    """One plane beside the weights. `elements_per_item`: parameters that one item stands for (scales: a group)."""

    name: str
    dtype: torch.dtype
    elements_per_item: int = 1

    def items(self, numel: int) -> int:
        """Items for `numel` parameters."""
        return -(-numel // self.elements_per_item)

    def cut(self, span: slice) -> slice:
        """The items of the parameters `span`, which starts at a whole item."""
        return slice(span.start // self.elements_per_item, self.items(span.stop))

    def nbytes(self, numel: int) -> int:
        return self.items(numel) * self.dtype.itemsize


def optimizer_planes(weight: torch.dtype, moments: StateFormat) -> tuple[PlaneSpec, ...]:
    """The planes beside weight and gradient for weights of dtype `weight`."""
    remainder = REMAINDER_DTYPE[weight]
    planes = [] if remainder is None else [PlaneSpec("remainder", remainder)]
    planes += [PlaneSpec(name, moments.dtype) for name in ("exp_avg", "exp_avg_sq")]
    if moments.has_scales:
        planes += [PlaneSpec(f"{name}_scale", torch.float32, moments.group) for name in ("exp_avg", "exp_avg_sq")]
    return tuple(planes)


def optimizer_bytes(planes: Sequence[PlaneSpec], numel: int) -> int:
    """Bytes of all optimizer planes for `numel` parameters."""
    return sum(plane.nbytes(numel) for plane in planes)


@dataclass(frozen=True)
class Planes:
    """Views of the same run of parameters in every plane; its start is a multiple of a scale's group."""

    weight: torch.Tensor
    remainder: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    exp_avg_scale: torch.Tensor | None = None
    exp_avg_sq_scale: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: torch.Tensor, views: dict[str, torch.Tensor]) -> Planes:
        """`views`: of the optimizer planes by name; without "remainder" where the weight is its own master."""
        rest = {name: view for name, view in views.items() if name != "remainder"}
        return cls(weight, views.get("remainder"), **rest)

    def part(self, span: slice, specs: Sequence[PlaneSpec]) -> Planes:
        """The parameters `span` of this run."""
        return Planes.of(self.weight[span], {spec.name: getattr(self, spec.name)[spec.cut(span)] for spec in specs})

    def nbytes(self) -> int:
        planes = (getattr(self, name) for name in self.__dataclass_fields__)
        return sum(plane.numel() * plane.element_size() for plane in planes if plane is not None)
