"""Parameters before an engine has them and after it has ended: ZeRO-3's attributes, and weights in `ds_tensor`.

`convert` gives parameters ZeRO-3's attributes. `DeepSpeedClients` takes their weights into the engine's state buffers;
from then on `ds_tensor` is a view of this rank's part, and `parameters` serves scripts. `leave_to_stock` gives the
parameters of an ended engine back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init, PartitionedParamStatus, ZeroParamStatus, is_zero_param
from torch import nn

from ds_slide.checkpoint import state_buffers
from ds_slide.errors import SlideError
from ds_slide.integration import absent_parameters
from ds_slide.model.carried import TRAINED_DTYPES, Divided, packed_tensors
from ds_slide.model.layout import Entry, piece
from ds_slide.optim.reference import encode_split
from ds_slide.runtime.core.context import Binding
from ds_slide.runtime.core.unit import Unit

if TYPE_CHECKING:
    from ds_slide.integration.parameters import ParameterProtocol

STOCKS_METHODS = "ds_slide_stocks_methods"
"""Attribute of a parameter: stock's methods by their names, which DS-Slide's methods replace."""


def convert(module: nn.Module, group: Any, dtype: torch.dtype) -> None:
    """Give every ordinary parameter ZeRO-3's attributes, without partitioning or moving it.

    `deepspeed.zero.Init` on a module would broadcast and copy each parameter into its own page-locked memory, and the
    parameter would be copied again from there. Only its attribute pass is needed. SlideError for a parameter without
    weights.
    """
    absent_parameters.leave(module.parameters())
    _require_weights(module)
    _as_partitioned(module)
    ordinary: list[Any] = [parameter for parameter in module.parameters() if not is_zero_param(parameter)]
    if not ordinary:
        return
    init = Init(module=None, data_parallel_group=group, remote_device="cpu", pin_memory=False, dtype=dtype)
    for parameter in ordinary:
        init._convert_to_deepspeed_param(parameter)
        parameter.ds_tensor = _placeholder(parameter, group)
        parameter.ds_status = ZeroParamStatus.AVAILABLE


def _require_weights(module: nn.Module) -> None:
    """Raise SlideError for a parameter whose elements went with an engine's SSD tier, or are not of one step."""
    for name, parameter in _partitioned(module):
        if parameter.ds_numel and not parameter.ds_tensor.numel():
            raise without_weights(name)
    _require_unspoiled(module)


def _require_unspoiled(module: nn.Module) -> None:
    """Raise SlideError for weights that an ended engine has left as a mixture of two steps."""
    for name, parameter in module.named_parameters():
        if why := getattr(getattr(parameter, "ds_tensor", None), "ds_slide_spoiled", ""):
            raise SlideError(
                f"parameter {name} has no whole weights, because the engine that had the model is gone, and {why}; "
                "build the model again, or load it, before deepspeed.initialize"
            )


def mark_spoiled(parameters: Iterable[Any], why: str) -> None:
    """Remember that the ended engine of `parameters` has left no whole weights. `why`: a clause about that engine."""
    for parameter in parameters:
        if isinstance(parameter.ds_tensor, Partition):
            parameter.ds_tensor.ds_slide_spoiled = why


def require_own_partitions(module: nn.Module) -> None:
    """Raise SlideError where a script has replaced an engine's partition by another tensor: it is not known which of
    the two has the weights."""
    for name, each in module.named_parameters():
        parameter: Any = each
        if hasattr(parameter, STOCKS_METHODS) and not isinstance(parameter.ds_tensor, Partition):
            raise SlideError(
                f"ds_tensor of parameter {name} is a tensor that DS-Slide has not made, so that its weights are in two "
                "places; write the parameter in deepspeed.zero.GatheredParameters(..., modifier_rank=0) instead"
            )


def _partitioned(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield names and parameters whose elements are in their partitions alone."""
    for name, each in module.named_parameters():
        parameter: Any = each
        if is_zero_param(each) and parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE:
            yield name, parameter


def _as_partitioned(module: nn.Module) -> None:
    """Give partitioned parameters the data type of their elements back.

    `module.to(torch.float32)` changes only their empty tensors, and stock gathers the partition in its own data type.
    axolotl does this to norms, whose outputs would no longer fit the weights after them.
    """
    for _, parameter in _partitioned(module):
        partition = parameter.ds_tensor
        # An earlier engine's narrowed weights are shorter than the parameter's declared data type.
        if not hasattr(partition, LOW_HALVES) and partition.dtype != parameter.dtype:
            parameter.data = torch.empty(0, dtype=partition.dtype, device=parameter.device)


def _placeholder(parameter: Any, group: Any) -> torch.Tensor:
    """Return a stand-in for the partition, with its sizes and no elements, until there is a partition."""
    tensor = torch.empty(0, dtype=parameter.dtype)
    return _as_partition(tensor, -(-parameter.ds_numel // dist.get_world_size(group)))


def _as_partition(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    partition: Any = tensor
    partition.ds_numel = numel
    partition.status = PartitionedParamStatus.AVAILABLE
    partition.final_location = None
    return tensor


@dataclass(frozen=True)
class DeepSpeedClients:
    """Shows the engine's parameters to DeepSpeed (`ds_slide.runtime.core.context.Clients`), on rank `rank` of
    `group`."""

    rank: int
    group: Any

    def take_weights(self, parameter: Any, entry: Entry) -> torch.Tensor:
        """Return this rank's elements of a parameter, from their place before DS-Slide has them. Collective over the
        ranks for a parameter that is not partitioned yet."""
        start, stop = piece(entry, self.rank)
        if parameter.ds_status == ZeroParamStatus.AVAILABLE:
            return _of_first_rank(parameter.data, self.group).reshape(-1)[start:stop]
        return read_left(parameter.ds_tensor, entry.name)[: stop - start]

    def take_carried(self, tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
        """Return this rank's elements of a carried tensor, in the same way."""
        start, stop = piece(entry, self.rank)
        if (divided := Divided.of(tensor)) is not None:
            return divided.own[: stop - start]
        return _of_first_rank(tensor.detach(), self.group).reshape(-1)[start:stop]

    def adopt(self, unit: Unit) -> None:
        """Point the parameters of `unit` at its state buffers and let go of their earlier memory."""
        parameters: Sequence[Any] = unit.parameters
        weights, remainder = unit.state.weights.buffer, unit.state.buffers.get("remainder")
        for parameter, entry, dtype in zip(parameters, unit.layout.entries, unit.dtypes, strict=True):
            span = entry.place
            view = weights.view(span)
            if view is None:  # the weights are on SSD: a read of the elements has to gather them
                view = torch.empty(0, dtype=entry.dtype or unit.dtype)
            else:
                view = entry.viewed(view, entry.partition_numel)
            # The same engine's access, where its states have moved.
            access = getattr(parameter.ds_tensor, "ds_slide_access", None)
            if access is not None:
                access[0].weights_move()
            parameter.ds_tensor = _as_partition(view, entry.partition_numel)
            parameter.ds_tensor.__class__ = Partition  # the view itself, so that weak references to it stay valid
            parameter.ds_tensor.ds_slide_access = access
            if unit.spec.precision.narrowed and entry.dtype is None:
                setattr(parameter.ds_tensor, LOW_HALVES, None if remainder is None else remainder.view(span))
            # The accelerator, not the place of the weights: a parameter's device says where the model computes.
            device = get_accelerator().current_device_name()
            absent_parameters.leave((parameter,))
            parameter.data = torch.empty(0, dtype=dtype, device=device)
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
            # Stock's word for "replicated throughout training". The choice of stage3_param_persistence_threshold has no
            # meaning here: small parameters of a block that is not on the GPU move with it.
            parameter.ds_persist = unit.resident is not None
            parameter.grad = None
            absent_parameters.intercept((parameter,))
        unit.find_carried_home()

    def set_availability(self, parameters: Sequence[Any], binding: Binding) -> None:
        """Set ZeRO-3's status of the parameters to that binding."""
        set_availability(parameters, binding)


def _of_first_rank(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Return rank 0's weights, which all ranks take, as under zero.Init: the ranks may have drawn different ones.

    One parameter at a time is copied to the accelerator: NCCL takes nothing from host memory, and writes into weights
    that are mapped from a file would copy all of them.
    """
    if dist.get_world_size(group) == 1:
        return own
    source = 0 if group == dist.get_world_group() else dist.get_global_rank(group, 0)
    there = own.detach().to(get_accelerator().current_device_name(), copy=True).contiguous()
    flat = there.reshape(-1)
    # Not every backend knows fp8 and other data types of packed weights: they pass as bytes.
    dist.broadcast(flat if flat.dtype in TRAINED_DTYPES else flat.view(torch.uint8), source, group=group)
    return there


def leave_to_stock(module: nn.Module) -> None:
    """Give the parameters of an ended engine stock's methods back, and whole elements where weights were kept shorter.

    Raises SlideError where weights, or their low halves, went with an engine's SSD, or are a mixture of two steps.
    """
    _require_unspoiled(module)
    allow_forwards(module)
    for name, each in module.named_parameters():
        parameter: Any = each
        if not hasattr(parameter, STOCKS_METHODS):
            continue
        absent_parameters.leave((parameter,))
        vars(parameter).pop(absent_parameters.PROTOCOL, None)
        partition = parameter.ds_tensor
        if partition.ds_numel and not partition.numel():
            raise without_weights(name)
        whole = read_left(partition, name) if hasattr(partition, LOW_HALVES) else partition.detach()
        parameter.ds_tensor = _as_partition(whole, partition.ds_numel)
        for method, stocks in vars(parameter).pop(STOCKS_METHODS).items():
            setattr(parameter, method, stocks)
        parameter.ds_persist = False
    for tensor in packed_tensors(module):
        if (divided := Divided.of(tensor)) is not None:
            _make_whole(tensor, divided, parameter.ds_process_group)


def _make_whole(tensor: torch.Tensor, divided: Divided, group: Any) -> None:
    """Gather a tensor beside packed weights, which stock keeps whole on every accelerator."""
    own = divided.own.to(get_accelerator().current_device_name()).contiguous()
    whole = own
    if dist.get_world_size(group) > 1:
        whole = own.new_empty(dist.get_world_size(group) * own.numel())
        dist.all_gather_into_tensor(whole.view(torch.uint8), own.view(torch.uint8), group=group)
    tensor.data = whole[: prod(divided.shape)].view(divided.shape)
    Divided.forget(tensor)


def set_availability(parameters: Sequence[Any], binding: Binding) -> None:
    """Set ZeRO-3's status and the class of the parameters to `binding`. ZeRO-3's parameter dictionaries read the status
    on every access."""
    status = ZeroParamStatus.NOT_AVAILABLE if binding is Binding.ABSENT else ZeroParamStatus.AVAILABLE
    classes = absent_parameters.OWN if binding is Binding.COMPUTING else absent_parameters.INTERCEPTED
    for parameter in parameters:  # 0.15 us each, for every block of every forward and backward
        parameter.ds_status = status
        parameter.__class__ = classes[parameter.__class__]


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


class Partition(torch.Tensor):
    """A tensor whose `data` can be set to values and stays where it is. Results computed from it are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    ds_slide_access: tuple[ParameterProtocol, nn.Parameter] | None = None
    """The engine's protocol and the parameter; None before there is an engine."""
    ds_slide_spoiled = ""
    """Why these are no weights of one step, as a clause about the engine; empty where they are. It outlives the
    engine."""

    @property
    def data(self) -> torch.Tensor:
        if self.ds_slide_access is not None:
            protocol, parameter = self.ds_slide_access
            protocol.settle(parameter)
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
            protocol, parameter = self.ds_slide_access
            protocol.write_partition(parameter, values.reshape(-1))


# ----------------------------------------------------------------------------------------------------------------------
# A model whose engine has ended: its weights are partitioned, and a forward has no weights to compute with.
#
# Forwards are possible while a script has gathered the parameters, and as soon as another engine has the model.


def refuse_forwards(module: nn.Module) -> None:
    """Let each module in `module` that has its own parameters raise a clear error instead of torch's error of sizes."""
    for child in module.modules():
        if any(True for _ in child.parameters(recurse=False)):
            child.register_forward_pre_hook(_refuse_forward)


def allow_forwards(module: nn.Module) -> None:
    """Allow forwards again: an engine has the model."""
    for child in module.modules():
        for number in [number for number, hook in child._forward_pre_hooks.items() if hook is _refuse_forward]:
            del child._forward_pre_hooks[number]


def _refuse_forward(module: nn.Module, _args: Any) -> None:
    for name, each in module.named_parameters(recurse=False):
        parameter: Any = each
        if getattr(parameter, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE:
            raise SlideError(
                f"a forward of a {type(module).__name__} whose {name} is not here, because the engine of the model has "
                "ended, by destroy(); give the model to deepspeed.initialize again, or compute with it in "
                "deepspeed.zero.GatheredParameters(model.parameters())"
            )
