"""A block whose recomputation the script has not asked for computes with the weights of its forward, or raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_slide.runtime.core.unit import Unit


class UnchangedWeights:
    """The block's function, for a checkpoint. Without the checkpoint, backward would use the forward's saved tensors: a
    graph that is older than a step raises in plain torch, or computes with the activations of that time."""

    def __init__(self, unit: Unit, function: Callable[..., Any]) -> None:
        self._unit, self._function = unit, function
        self._parameters = [parameter for each in (unit, *unit.parts) for parameter in each.parameters]
        self._versions: list[int] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self._versions is not None and self._versions != self._versions_now():
            raise RuntimeError(
                f"the weights of {self._unit.name} have been modified since the forward of this graph, and its "
                "activations would be recomputed with the new ones; call backward() before engine.step(), or set "
                'ds_slide.activations to "as_written"'
            )
        try:
            return self._function(*inputs)
        finally:  # not before: a forward may write to its weights before it uses them
            self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]
