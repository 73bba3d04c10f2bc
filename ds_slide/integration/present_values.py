"""The value of one parameter for a script that reads or writes it between forwards (`absent_parameters`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from ds_slide.checkpoint import state_buffers
from ds_slide.errors import SlideError
from ds_slide.integration import left_weights
from ds_slide.model.layout import Entry, piece
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.unit import Unit
from ds_slide.runtime.weights.residents import AS_THEY_ARE
from ds_slide.runtime.weights.uses import UseToken

GATHER = "inside `with deepspeed.zero.GatheredParameters([parameter]):`"


class PresentValues:
    """Serves the parameters of one runtime. Each call waits for the update of the parameter's unit and nothing else.

    A read is no collective: with shared weights a rank reads the other ranks' parts of a block from their memory. A
    write is for all ranks together.
    """

    def __init__(
        self,
        runtime: SlideRuntime,
        places: Mapping[nn.Parameter, tuple[Unit, Entry]],
        most_elements: int,
        read: Callable[[nn.Parameter], torch.Tensor],
    ) -> None:
        """`most_elements`: of a small parameter (`stage3_param_persistence_threshold`). `read`: gives the whole weights
        of one that is not on the accelerator, without a collective where this rank can read all of them."""
        self._read = read
        self._runtime = runtime
        self._places = places
        self._most_elements = most_elements
        self._block_of = {part.order: unit for unit in runtime.units for part in unit.parts}
        self.gathered: set[nn.Parameter] = set()
        """Parameters that a script has whole, in memory of their own."""

    def is_gathered(self, parameter: Any) -> bool:
        return parameter in self.gathered and parameter.ds_status == ZeroParamStatus.AVAILABLE

    def is_small(self, parameter: Any) -> bool:
        return self._places[parameter][1].numel <= self._most_elements

    def is_readable(self, parameter: Any) -> bool:
        if parameter.ds_status == ZeroParamStatus.AVAILABLE:
            return True
        return self._refusal(*self._places[parameter], together=False) is None

    def present(self, parameter: Any, *, together: bool) -> tuple[torch.Tensor, bool]:
        unit, entry = self._places[parameter]
        if parameter.ds_status != ZeroParamStatus.AVAILABLE:
            if (refusal := self._refusal(unit, entry, together=together)) is not None:
                raise refusal
            state_buffers.require_stepped(self._runtime, unit, "computing with a parameter")
            if unit.resident is None:
                with torch.inference_mode(False), torch.no_grad():
                    return self._read(parameter).to(parameter.dtype), False
            self._runtime.resident_weights.bind(unit)
        with AS_THEY_ARE():
            return parameter.data, True

    def _refusal(self, unit: Unit, entry: Entry, *, together: bool) -> SlideError | None:
        """Why the value cannot be had, if it cannot."""
        if unit.resident is None and entry.numel > self._most_elements:
            return SlideError(
                f"{entry.name} of shape {tuple(entry.shape)} is not on the accelerator between forwards, because it "
                f"has more than {self._most_elements:,} elements (stage3_param_persistence_threshold); compute with it "
                f"{GATHER}, or read its master by deepspeed.utils.safe_get_full_fp32_param(parameter)"
            )
        if not together and self._is_collective(unit):
            return SlideError(
                f"{entry.name} has parts on other ranks, which one rank alone cannot read because weights are gathered "
                f"over the process group; compute with it {GATHER} on all ranks"
            )
        return None

    def _is_collective(self, unit: Unit) -> bool:
        """Whether a read needs all ranks."""
        parts = self._runtime.parts
        if parts.ranks.world_size == 1:
            return False
        if unit.resident is not None:
            return unit.is_gathered
        shared = parts.shared is not None and unit.order in parts.shared.parts
        return not shared or unit.state.writes_change or unit.spec.precision.narrowed

    def write(self, parameter: Any, value: torch.Tensor) -> None:
        """Make `value` the weights. Elements that do not change keep their exact master. Collective over the ranks."""
        unit, entry = self._places[parameter]
        if tuple(value.shape) != tuple(entry.shape):
            raise SlideError(
                f"{entry.name} has the shape {tuple(entry.shape)}, but the value given has {tuple(value.shape)}; give "
                "a value of the parameter's shape"
            )
        runtime = self._runtime
        start, stop = piece(entry, runtime.parts.ranks.rank)
        if runtime.has_ended:
            left_weights.write(parameter.ds_tensor, value.reshape(-1)[start:stop])
            return
        state_buffers.require_stepped(runtime, unit, "writing to a parameter")
        runtime.settle(unit)
        runtime.begin_writing()
        changed = state_buffers.write_weight(unit, entry, value.reshape(-1)[start:stop])
        if changed or runtime.parts.ranks.world_size > 1:
            runtime.weights_changed(unit)

    def bringer(self, parameter: Any) -> _Bringer:
        unit = self._places[parameter][0]
        return _Bringer(self._runtime, self._block_of.get(unit.order, unit), unit, parameter)


class _Bringer:
    """Brings the gradient of a copy to its parameter, where it is added and leaves with that of the block.

    The copy counts as a use of the block, which so keeps its gradients until they are complete.
    """

    def __init__(self, runtime: SlideRuntime, block: Unit, unit: Unit, parameter: Any) -> None:
        self._runtime = runtime
        self._unit = unit
        self._parameter = parameter
        block.uses += 1
        self._use = UseToken(block)

    def __call__(self, copy: torch.Tensor) -> None:
        parameter, gradient = self._parameter, copy.grad
        assert gradient is not None
        copy.grad = None
        with AS_THEY_ARE(), torch.no_grad():
            if parameter.grad is None:
                held = parameter.data
                parameter.data = gradient.detach()  # a gradient must have the shape of its parameter when it is set
                parameter.grad = gradient
                parameter.data = held
            else:
                parameter.grad.add_(gradient)
            self._use.fire(self._runtime.end_use)
        torch.autograd.Variable._execution_engine.queue_callback(self._take_left)

    def _take_left(self) -> None:
        """Take the gradient of a graph that has ended and has no output of the engine's forward: no end of backward
        follows."""
        with AS_THEY_ARE():
            if self._parameter.grad is not None and not self._runtime.accumulation.is_open:
                self._runtime.taking.take_left_gradient(self._unit)
