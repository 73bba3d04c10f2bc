"""The data types in which a parameter is declared, kept, computed with and reduced."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """The data types of all parameters of a unit."""

    parameter: torch.dtype
    """The data type that the model declares, and as a script sees them outside of a forward."""
    weight: torch.dtype
    """The data type of what the GPU computes with."""
    gradient: torch.dtype | None = None
    """The data type in which their gradients are reduced and go to host memory; None: that of the run."""

    @classmethod
    def declared(cls, parameter: torch.Tensor) -> Precision:
        """Weights as the model has them."""
        return cls(parameter.dtype, parameter.dtype)

    @property
    def narrowed(self) -> bool:
        """Whether the weights are shorter than the parameters. The master then begins as the parameter's exact value,
        and is what a script reads and writes."""
        return self.weight is not self.parameter

    @property
    def label(self) -> str:
        """A part of the names of units."""
        kept = f" in {_name(self.weight)}" if self.narrowed else ""
        reduced = f", gradients in {_name(self.gradient)}" if self.gradient not in (None, self.weight) else ""
        return f"{_name(self.parameter)}{kept}{reduced}"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
