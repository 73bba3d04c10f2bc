"""`safe_get_full_*`, `safe_set_full_*` and their local forms: one parameter's master, optimizer states and gradient.

Every call first waits for what it needs and nothing else: the parameter's unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from torch import nn

from ds_slide.checkpoint import state_buffers
from ds_slide.errors import SlideAttributeError, SlideError
from ds_slide.integration.refused import require_own_layout
from ds_slide.model.layout import Entry, piece
from ds_slide.optim.rule import UpdateRule
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.core.update import SquareSum
from ds_slide.runtime.ended import ENDED
from ds_slide.runtime.engine import SlideRuntime

Places = dict[nn.Parameter, tuple[Unit, Entry]]


class StateAccess:
    """All tensors handed out are fp32 on the accelerator; `full` ones have the parameter's shape (collective). Setting
    a master is collective, too, because other ranks read the weights (`StateAccess.begin_writing`)."""

    def __init__(self, runtime: SlideRuntime, places: Places, group: Any, rule: UpdateRule) -> None:
        self._runtime = runtime
        self._places = places
        self._group = group
        self._rule = rule

    def local_state(self, parameter: nn.Parameter, key: str | None) -> torch.Tensor | None:
        """Return the master (`key` None) or state of this rank's partition, [partition_numel]."""
        place = self._trainable(parameter)
        if place is None:
            return None
        if key is not None:
            require_own_layout(place[0], "the optimizer state")
        state_buffers.require_stepped(self._runtime, place[0], "reading a state")
        self._runtime.access.settle(place[0])
        unit, entry = place
        own = state_buffers.read_values(unit, self._known(key), state_buffers.local_span(entry))
        return own.to(self._runtime.device.torch, copy=True)

    def full_state(self, parameter: nn.Parameter, key: str | None) -> torch.Tensor | None:
        return self._gather(parameter, self.local_state(parameter, key))

    def set_local_state(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None) -> None:
        place = self._trainable(parameter)
        if place is None:
            return
        unit, entry = place
        if key is not None:
            require_own_layout(unit, "the optimizer state")
        state_buffers.require_stepped(self._runtime, unit, "writing a state")
        self._runtime.access.settle(unit)
        if key is None:
            self._runtime.access.begin_writing()
        own = value.reshape(-1)[: entry.partition_numel].float()
        state_buffers.write_values(unit, self._known(key), slice(entry.offset, entry.offset + own.numel()), own)
        if key is None:
            self._runtime.access.weights_changed(unit)

    def set_full_state(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None) -> None:
        place = self._trainable(parameter)
        if place is not None:
            self.set_local_state(parameter, self._own(value, place[1]), key)

    def local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        place = self._trainable(parameter)
        if place is None:
            return None
        unit, entry = place
        self._settle_gradient(unit)
        gradient = unit.state.read("gradient", state_buffers.local_span(entry))
        return gradient.to(device=self._runtime.device.torch, dtype=torch.float32, copy=True)

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return self._gather(parameter, self.local_gradient(parameter))

    def set_local_gradient(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        place = self._trainable(parameter)
        if place is None:
            return
        unit, entry = place
        own = value.reshape(-1)[: entry.partition_numel]
        self._settle_gradient(unit)
        if not unit.gradient.ready:
            # The unit's other parameters have no gradient; the buffer still has the last step's.
            unit.state.zero_gradient()
        unit.state.write("gradient", slice(entry.offset, entry.offset + own.numel()), own)
        unit.gradient.square_sum = SquareSum()
        unit.gradient.ready = True

    def set_full_gradient(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        place = self._trainable(parameter)
        if place is not None:
            self.set_local_gradient(parameter, self._own(value, place[1]))

    def map_gradients(
        self, function: Callable[[torch.Tensor, nn.Parameter], torch.Tensor], parameters: Sequence[nn.Parameter]
    ) -> None:
        """Replace the full gradient of each parameter by `function(gradient, parameter)`."""
        for parameter in parameters:
            gradient = self.full_gradient(parameter)
            if gradient is not None:
                self.set_full_gradient(parameter, function(gradient, parameter))

    def device_of(self, parameter: nn.Parameter) -> torch.device | None:
        """Return the device of the parameter's states; None where it has none."""
        place = self._trainable(parameter)
        return None if place is None else place[0].state.device

    def _trainable(self, parameter: nn.Parameter) -> tuple[Unit, Entry] | None:
        self._runtime.access.require_running("reading or writing a state")
        place = self._places[parameter]
        return place if place[1].trainable else None

    def _settle_gradient(self, unit: Unit) -> None:
        require_own_layout(unit, "the gradient")
        self._runtime.taking.require_held("reading or writing a gradient")
        self._runtime.access.settle(unit)
        self._runtime.parts.context.lanes.update.drain()  # an accumulation may be under way

    def _own(self, value: torch.Tensor, entry: Entry) -> torch.Tensor:
        if value.numel() != entry.numel:
            raise SlideError(f"{entry.name} has {entry.numel} elements, but the value given has {value.numel()}")
        start, stop = piece(entry, self._runtime.parts.context.ranks.rank)
        return value.reshape(-1)[start:stop]

    def _gather(self, parameter: nn.Parameter, own: torch.Tensor | None) -> torch.Tensor | None:
        if own is None:
            return None
        entry = self._places[parameter][1]
        whole = own
        if self._runtime.parts.context.ranks.world_size > 1:
            whole = own.new_empty(self._runtime.parts.context.ranks.world_size * own.numel())
            dist.all_gather_into_tensor(whole, own.contiguous(), group=self._group)
        return whole[: entry.numel].view(entry.shape)

    def _known(self, key: str | None) -> str:
        if key is None:
            return state_buffers.MASTER
        names = self._rule.state_names
        if key not in names:
            raise SlideError(
                f"there is no optimizer state '{key}'; {self._rule.name} has {' and '.join(names) or 'none'}"
            )
        return key


class EndedAccess:
    """Replaces an ended engine's optimizer at its parameters, which would keep the optimizer alive."""

    def __getattr__(self, name: str) -> Any:
        raise SlideAttributeError(f"{name}() of a parameter is refused: {ENDED}")


def end_access(parameters: Iterable[Any], optimizer: Any) -> None:
    """Let go of `optimizer` where DeepSpeed has put it for `deepspeed.utils.safe_*`."""
    for parameter in parameters:
        if getattr(parameter, "_z3_optimizer", None) is optimizer:
            parameter._z3_optimizer = EndedAccess()
