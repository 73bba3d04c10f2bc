"""Who else uses the parameters of a model: the host, whose own methods read them."""

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
"""Around what the engine does with parameters that are KEPT or ABSENT: 0.25 us, where each access to `grad` of one that
the integration watches would cost 2 us."""


class Binding(Enum):
    """What the parameters of a unit hold."""

    COMPUTING = auto()
    """The weights, for a forward or backward."""
    KEPT = auto()
    """The weights, between forwards."""
    ABSENT = auto()
    """Nothing."""


class Clients(Protocol):
    """`ds_slide.integration.parameters.DeepSpeedClients` for DeepSpeed."""

    def take_weights(self, parameter: nn.Parameter, entry: Entry) -> torch.Tensor:
        """This rank's elements of a parameter that is not the engine's yet, flat ([<= partition_numel]), on any
        device."""

    def adopt(self, unit: Unit) -> None:
        """The unit's state buffers hold its weights: what its parameters held before may be freed."""

    def set_availability(self, parameters: Sequence[nn.Parameter], binding: Binding) -> None:
        """What the parameters hold: called before they are given weights, and after these are taken from them."""
