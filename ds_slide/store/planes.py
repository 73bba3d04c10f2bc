"""The planes of a unit: flat arrays that hold one state of all its parameters, and what an update needs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ds_slide.optim.low_precision import StateFormat
from ds_slide.optim.rule import StateSpec, UpdateRule

REMAINDER_DTYPE = {torch.bfloat16: torch.int16, torch.float16: torch.float32, torch.float32: None}
"""Of the plane that completes a weight to its fp32 master, by the weight's dtype."""


@dataclass(frozen=True)
class PlaneSpec:
    """One plane beside the weights. `elements_per_item`: parameters that one item stands for (scales: a group).
    `state`: the state of the update rule whose values it holds; None for a remainder and for scales."""

    name: str
    dtype: torch.dtype
    elements_per_item: int = 1
    state: StateSpec | None = None

    def items(self, numel: int) -> int:
        """Items for `numel` parameters."""
        return -(-numel // self.elements_per_item)

    def cut(self, span: slice) -> slice:
        """The items of the parameters `span`, which starts at a whole item."""
        return slice(span.start // self.elements_per_item, self.items(span.stop))

    def nbytes(self, numel: int) -> int:
        return self.items(numel) * self.dtype.itemsize


def optimizer_planes(weight: torch.dtype, rule: UpdateRule, stored: StateFormat) -> tuple[PlaneSpec, ...]:
    """The planes beside weight and gradient for weights of dtype `weight` that are updated by `rule`. `stored`: how its
    states are."""
    remainder = REMAINDER_DTYPE[weight]
    planes = [] if remainder is None else [PlaneSpec("remainder", remainder)]
    planes += [PlaneSpec(state.name, stored.dtype, state=state) for state in rule.states]
    if stored.has_scales:
        planes += [PlaneSpec(scales_of(state.name), torch.float32, stored.group) for state in rule.states]
    return tuple(planes)


def scales_of(state: str) -> str:
    """The name of the plane of a state's scales."""
    return f"{state}_scale"


def optimizer_bytes(planes: Sequence[PlaneSpec], numel: int) -> int:
    """Bytes of all optimizer planes for `numel` parameters."""
    return sum(plane.nbytes(numel) for plane in planes)


@dataclass(frozen=True)
class Planes:
    """Views of the same run of parameters in every plane; its start is a multiple of a scale's group. `optimizer`: the
    planes beside weight and gradient, by name."""

    weight: torch.Tensor
    optimizer: Mapping[str, torch.Tensor]

    @property
    def remainder(self) -> torch.Tensor | None:
        """None where the weight is its own master."""
        return self.optimizer.get("remainder")

    def states(self, rule: UpdateRule) -> list[torch.Tensor]:
        """In the order of the rule."""
        return [self.optimizer[state.name] for state in rule.states]

    def scales(self, rule: UpdateRule) -> list[torch.Tensor | None]:
        """Of the states, None where they hold their values as they are."""
        return [self.optimizer.get(scales_of(state.name)) for state in rule.states]

    def part(self, span: slice, specs: Sequence[PlaneSpec]) -> Planes:
        """The parameters `span` of this run."""
        return Planes(self.weight[span], {spec.name: self.optimizer[spec.name][spec.cut(span)] for spec in specs})

    def nbytes(self) -> int:
        return sum(plane.numel() * plane.element_size() for plane in (self.weight, *self.optimizer.values()))
