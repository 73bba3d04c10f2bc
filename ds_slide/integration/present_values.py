"""Values of parameters where no forward runs: of a living engine, of one that has ended, and in `ds_tensor`.

First the value of one parameter for a script that reads or writes it between forwards (`absent_parameters`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from ds_slide.checkpoint import state_buffers
from ds_slide.errors import SlideError
from ds_slide.model.layout import Entry, piece
from ds_slide.optim.reference import encode_split
from ds_slide.runtime.core.clients import AS_THEY_ARE
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.engine import SlideRuntime
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
        """`most_elements`: the limit of a small parameter (`stage3_param_persistence_threshold`). `read`: returns the
        whole weights of a parameter that is not on the accelerator, without a collective where this rank can read
        them."""
        self._read = read
        self._runtime = runtime
        self._places = places
        self._most_elements = most_elements
        self._block_of = {part.order: unit for unit in runtime.units for part in unit.parts}
        self.gathered: set[nn.Parameter] = set()
        """Parameters that a script has gathered, in memory of their own."""

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
        """Return the error if the value cannot be read, otherwise None."""
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
        if parts.context.ranks.world_size == 1:
            return False
        if unit.resident is not None:
            return unit.is_gathered
        shared = parts.context.shared is not None and unit.order in parts.context.shared.parts
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
        start, stop = piece(entry, runtime.parts.context.ranks.rank)
        if runtime.access.has_ended:
            write_left(parameter.ds_tensor, value.reshape(-1)[start:stop])
            return
        state_buffers.require_stepped(runtime, unit, "writing to a parameter")
        runtime.access.settle(unit)
        runtime.access.begin_writing()
        changed = state_buffers.write_weight(unit, entry, value.reshape(-1)[start:stop])
        if changed or runtime.parts.context.ranks.world_size > 1:
            runtime.access.weights_changed(unit)

    def bringer(self, parameter: Any) -> _Bringer:
        unit = self._places[parameter][0]
        return _Bringer(self._runtime, self._block_of.get(unit.order, unit), unit, parameter)


class _Bringer:
    """Brings the gradient of a copy to its parameter, where it is added and leaves with the block's gradient.

    The copy counts as a use of the block, so that the block keeps its gradients until they are complete.
    """

    def __init__(self, runtime: SlideRuntime, block: Unit, unit: Unit, parameter: Any) -> None:
        self._runtime = runtime
        self._unit = unit
        self._parameter = parameter
        block.uses.begun += 1
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
            self._use.fire(self)
        torch.autograd.Variable._execution_engine.queue_callback(self._take_left)

    def leave_backward(self, unit: Unit) -> None:
        """End the block's use by the copy."""
        self._runtime.end_use(unit)

    def _take_left(self) -> None:
        """Take the gradient of an ended graph without an output of the engine's forward: no end of backward follows."""
        with AS_THEY_ARE():
            if self._parameter.grad is not None and not self._runtime.accumulation.is_open:
                self._runtime.taking.take_left_gradient(self._unit)


# ----------------------------------------------------------------------------------------------------------------------
# The weights that an ended engine has left: only in `ds_tensor` of each parameter.
#
# An engine's state buffers go with it (`ds_slide.runtime.ended`). A view of the weights stays with each parameter, so
# that a script can still gather them, and so that the next engine of the model begins with them.

LOW_HALVES = "ds_slide_low_halves"
"""Attribute of the partition of narrowed weights: the low halves of their masters, None where these are on SSD. It
outlives the engine, for the next engine of the model."""


def without_weights(name: str) -> SlideError:
    """Return the error for parameter `name`, whose weights were on an SSD tier."""
    return SlideError(
        f"parameter {name} has no weights: they were on the SSD of an engine that was destroyed; build the model "
        "again, or load it, before deepspeed.initialize"
    )


def read_left(partition: Any, name: str) -> torch.Tensor:
    """Return the elements of the partition of parameter `name`, flat; the masters of narrowed weights."""
    low: torch.Tensor | None = getattr(partition, LOW_HALVES, partition)
    if low is None:
        raise SlideError(
            f"parameter {name} has no exact weights: half of each was on the SSD of an engine that was destroyed; "
            "build the model again, or load it, before deepspeed.initialize"
        )
    if partition.ds_numel and not partition.numel():
        raise without_weights(name)
    return partition.reshape(-1) if low is partition else state_buffers.joined(partition.reshape(-1), low)


def write_left(partition: Any, values: torch.Tensor) -> None:
    """Set the first elements of the partition to the flat `values`."""
    weights: torch.Tensor = partition.reshape(-1)[: values.numel()]
    low: torch.Tensor | None = getattr(partition, LOW_HALVES, None)
    if low is None:
        weights.copy_(values)
        return
    high, low_halves = encode_split(values.float().cpu())
    weights.copy_(high.view(weights.dtype))
    low[: values.numel()].copy_(low_halves)


# ----------------------------------------------------------------------------------------------------------------------
# `parameter.ds_tensor` of an engine with DS-Slide: this rank's elements of a parameter, a view of a state buffer.
#
# Scripts write to it as to any tensor of ZeRO-3: `parameter.ds_tensor.data = values`. An ordinary tensor would point
# elsewhere from then on: the engine would train its own weights, and the next engine of the model would begin with the
# script's values.


@dataclass(frozen=True)
class Access:
    """The access to an engine's weights. `settle` waits until no update of them is under way."""

    settle: Callable[[], None]
    write: Callable[[torch.Tensor], None]


class Partition(torch.Tensor):
    """A tensor whose `data` can be set to values and stays where it is. Results computed from it are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    ds_slide_access: Access | None = None
    """The access to the engine's weights; None before there is an engine."""
    ds_slide_spoiled = ""
    """Why these are no weights of one step, as a clause about the engine; empty where they are. It outlives the
    engine."""

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
    """Return a plain tensor on the same memory, which stock may point elsewhere."""
    return tensor.detach()


# ----------------------------------------------------------------------------------------------------------------------
# A model whose engine has ended: its weights are partitioned, and a forward has no weights to compute with.
#
# Forwards are possible while a script has gathered the parameters, and as soon as another engine has the model.


def refuse_forwards(module: nn.Module) -> None:
    """Let each module in `module` that has its own parameters raise a clear error instead of torch's error of sizes."""
    for child in module.modules():
        if any(True for _ in child.parameters(recurse=False)):
            child.register_forward_pre_hook(_require_weights)


def allow_forwards(module: nn.Module) -> None:
    """Allow forwards again: an engine has the model."""
    for child in module.modules():
        for number in [number for number, hook in child._forward_pre_hooks.items() if hook is _require_weights]:
            del child._forward_pre_hooks[number]


def _require_weights(module: nn.Module, _args: Any) -> None:
    for name, each in module.named_parameters(recurse=False):
        parameter: Any = each
        if getattr(parameter, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE:
            raise SlideError(
                f"a forward of a {type(module).__name__} whose {name} is not here, because the engine of the model has "
                "ended, by destroy(); give the model to deepspeed.initialize again, or compute with it in "
                "deepspeed.zero.GatheredParameters(model.parameters())"
            )
