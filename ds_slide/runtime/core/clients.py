"""The interface to the other user of a model's parameters: the host framework, whose own methods read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from ds_slide.model.layout import Entry

if TYPE_CHECKING:
    from ds_slide.runtime.core.unit import Unit

AS_THEY_ARE: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""A context for the engine's work on KEPT or ABSENT parameters. It costs 0.25 us; each access to `grad` of a parameter
that the integration watches would cost 2 us."""


class Binding(Enum):
    """What the parameters of a unit hold."""

    COMPUTING = auto()
    """The weights, for a forward or backward."""
    KEPT = auto()
    """The weights, between forwards."""
    ABSENT = auto()
    """Nothing."""


class Clients(Protocol):
    """`ds_slide.integration.partitions.DeepSpeedClients` for DeepSpeed."""

    def take_weights(self, parameter: nn.Parameter, entry: Entry) -> torch.Tensor:
        """Return this rank's elements of a parameter that is not the engine's yet, flat ([<= partition_numel]), on any
        device."""

    def adopt(self, unit: Unit) -> None:
        """Free what the unit's parameters held: its state buffers hold the weights now."""

    def set_availability(self, parameters: Sequence[nn.Parameter], binding: Binding) -> None:
        """Record what the parameters hold. Called before they get weights and after they lose them."""
