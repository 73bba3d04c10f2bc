"""ZeRO-3's parameter protocol (`ds_id`, `ds_tensor`, `all_gather`, `partition`, ...) over DS-Slide's state buffers.

`deepspeed.zero.GatheredParameters`, Hugging Face and checkpointing reach parameters through these attributes. After
`adopt`, `ds_tensor` is a view of this rank's weights' state buffer, and gathering waits for a pending update first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init, PartitionedParamStatus, ZeroParamStatus, is_zero_param
from torch import nn

from ds_slide.checkpoint import state_buffers
from ds_slide.errors import SlideError
from ds_slide.integration import absent_parameters, plain_copy, present_values
from ds_slide.integration.present_values import LOW_HALVES, Access, Partition, PresentValues, as_partition, as_plain
from ds_slide.model.layout import Entry, piece
from ds_slide.report.log import size
from ds_slide.runtime.core.clients import Binding
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.engine import SlideRuntime

_STOCKS = "ds_slide_stocks_methods"
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
            raise present_values.without_weights(name)
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
        if hasattr(parameter, _STOCKS) and not isinstance(parameter.ds_tensor, Partition):
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
    """Shows the engine's parameters to DeepSpeed (`ds_slide.runtime.core.clients.Clients`), on rank `rank` of
    `group`."""

    rank: int
    group: Any

    def take_weights(self, parameter: Any, entry: Entry) -> torch.Tensor:
        """Return this rank's elements of a parameter, from their place before DS-Slide has them. Collective over the
        ranks for a parameter that is not partitioned yet."""
        start, stop = piece(entry, self.rank)
        if parameter.ds_status == ZeroParamStatus.AVAILABLE:
            return _of_first_rank(parameter.data, self.group).reshape(-1)[start:stop]
        return present_values.read_left(parameter.ds_tensor, entry.name)[: stop - start]

    def adopt(self, unit: Unit) -> None:
        """Point the parameters of `unit` at its state buffers and let go of their earlier memory."""
        parameters: Sequence[Any] = unit.parameters
        weights, remainder = unit.state.weights.buffer, unit.state.buffers.get("remainder")
        for parameter, entry in zip(parameters, unit.layout.entries, strict=True):
            span = state_buffers.local_span(entry)
            view = weights.view(span)
            if view is None:  # the weights are on SSD: a read of the elements has to gather them
                view = torch.empty(0, dtype=unit.dtype)
            # The same engine's access, where its states have moved.
            access = getattr(parameter.ds_tensor, "ds_slide_access", None)
            parameter.ds_tensor = _as_partition(as_partition(view), entry.partition_numel)
            parameter.ds_tensor.ds_slide_access = access
            if unit.spec.precision.narrowed:
                setattr(parameter.ds_tensor, LOW_HALVES, None if remainder is None else remainder.view(span))
            # The accelerator, not the place of the weights: a parameter's device says where the model computes.
            device = get_accelerator().current_device_name()
            absent_parameters.leave((parameter,))
            parameter.data = torch.empty(0, dtype=unit.parameter_dtype, device=device)
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
            # Stock's word for "replicated throughout training". The choice of stage3_param_persistence_threshold has no
            # meaning here: small parameters of a block that is not on the GPU move with it.
            parameter.ds_persist = unit.resident is not None
            parameter.grad = None
            absent_parameters.watch((parameter,))

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
    dist.broadcast(there, source, group=group)
    return there


def leave_to_stock(module: nn.Module) -> None:
    """Give the parameters of an ended engine stock's methods back, and whole elements where weights were kept shorter.

    Raises SlideError where weights, or their low halves, went with an engine's SSD, or are a mixture of two steps.
    """
    _require_unspoiled(module)
    plain_copy.forget(module)
    present_values.allow_forwards(module)
    for name, each in module.named_parameters():
        parameter: Any = each
        if not hasattr(parameter, _STOCKS):
            continue
        absent_parameters.leave((parameter,))
        vars(parameter).pop(absent_parameters.VALUES, None)
        partition = parameter.ds_tensor
        if partition.ds_numel and not partition.numel():
            raise present_values.without_weights(name)
        whole = present_values.read_left(partition, name) if hasattr(partition, LOW_HALVES) else as_plain(partition)
        parameter.ds_tensor = _as_partition(whole, partition.ds_numel)
        for method, stocks in vars(parameter).pop(_STOCKS).items():
            setattr(parameter, method, stocks)
        parameter.ds_persist = False


def set_availability(parameters: Sequence[Any], binding: Binding) -> None:
    """Set ZeRO-3's status and the class of the parameters to `binding`. ZeRO-3's parameter dictionaries read the status
    on every access."""
    status = ZeroParamStatus.NOT_AVAILABLE if binding is Binding.ABSENT else ZeroParamStatus.AVAILABLE
    classes = absent_parameters.OWN if binding is Binding.COMPUTING else absent_parameters.WATCHED
    for parameter in parameters:  # 0.15 us each, for every block of every forward and backward
        parameter.ds_status = status
        parameter.__class__ = classes[parameter.__class__]


class _Gathered:
    """The handle that `all_gather_coalesced` returns; the work is done already."""

    def wait(self, *_args: Any, **_kwargs: Any) -> None:
        return None


class ParameterProtocol:
    """`all_gather` and `partition` for every parameter of a runtime."""

    def __init__(self, runtime: SlideRuntime, group: Any, most_elements: int) -> None:
        """`most_elements`: the limit for a parameter that is readable between forwards
        (`stage3_param_persistence_threshold`)."""
        self._runtime = runtime
        self._group = group
        self.places: dict[nn.Parameter, tuple[Unit, Entry]] = {}
        self.refresh()
        self._until_backward_ends: list[Any] = []
        """Parameters gathered because a module other than their own has read them in its forward: only `release` lets
        go of them."""
        self.values = PresentValues(runtime, self.places, most_elements, self._copied)
        for parameter in self.places:
            self._install(parameter)

    def refresh(self) -> None:
        """Take the places of the parameters from their units, where more parameters may be trainable now."""
        for unit in self._runtime.units:
            self.places |= {
                parameter: (unit, entry) for parameter, entry in zip(unit.parameters, unit.layout.entries, strict=True)
            }

    def _install(self, parameter: Any) -> None:
        def all_gather(param_list: Iterable[Any] | None = None, async_op: bool = False, hierarchy: int = 0) -> None:
            if param_list is None and parameter.ds_status != ZeroParamStatus.AVAILABLE:
                if self._is_bound_in_forward(parameter):
                    return
                self._until_backward_ends.append(parameter)
            self.gather([parameter] if param_list is None else param_list)

        def all_gather_coalesced(params: Iterable[Any], safe_mode: bool = False, quantize: bool = False) -> _Gathered:
            self.gather(params)
            return _Gathered()

        def partition(
            param_list: Iterable[Any] | None = None,
            hierarchy: int = 0,
            has_been_updated: bool = False,
            free_data: bool = True,
        ) -> None:
            self.partition([parameter] if param_list is None else param_list, updated=has_been_updated)

        ours = {"all_gather": all_gather, "all_gather_coalesced": all_gather_coalesced, "partition": partition}
        if not hasattr(parameter, _STOCKS):  # otherwise the present methods are an earlier engine's
            setattr(parameter, _STOCKS, {method: getattr(parameter, method) for method in ours})
        for method, function in ours.items():
            setattr(parameter, method, function)
        parameter.ds_tensor.ds_slide_access = Access(
            functools.partial(self._settle, parameter), functools.partial(self._write_partition, parameter)
        )
        setattr(parameter, absent_parameters.VALUES, self.values)

    def _is_bound_in_forward(self, parameter: Any) -> bool:
        """Bind a parameter that a forward reads to its weights, if these are on the GPU anyway: a copy of a vocabulary
        matrix would stay there until the backward has ended. -> whether it is bound. A parameter that a script has cast
        gets a copy instead."""
        unit, _ = self.places[parameter]
        if unit.resident is None or parameter.dtype != unit.parameter_dtype or not self._runtime.is_in_forward:
            return False
        state_buffers.require_stepped(self._runtime, unit, "gathering a parameter")
        self._runtime.resident_weights.bind(unit)
        return True

    def gather(self, parameters: Iterable[Any]) -> None:
        """Put the whole parameters on the accelerator, each in its own memory: changes that the caller makes there
        (merging an adapter and taking it out again) do not change the weights. In a forward, parameters of outer
        modules on the GPU are the weights themselves (`_is_bound_in_forward`). Waits for the updates of their units
        only. Collective over the ranks for parameters that are not on the accelerator.
        """
        mine: list[Any] = []
        for parameter in parameters:
            if parameter in self.places:
                mine.append(parameter)
            else:  # a parameter of another engine, named in the same call
                parameter.all_gather()
        self._require_room(mine)
        # Tensors made in inference mode, by an evaluation, could not be saved by the graph of a later forward.
        with torch.inference_mode(False):
            for parameter in mine:
                unit = self.places[parameter][0]
                if unit.resident is None and parameter.ds_status == ZeroParamStatus.AVAILABLE:
                    continue
                state_buffers.require_stepped(self._runtime, unit, "gathering a parameter")
                if unit.resident is None:
                    whole = self._whole(parameter)
                    set_availability([parameter], Binding.COMPUTING)
                    parameter.data = whole
                    self.values.gathered.add(parameter)
                    continue
                if parameter.ds_status != ZeroParamStatus.AVAILABLE:
                    self._runtime.resident_weights.bind(unit)
                absent_parameters.leave((parameter,))
                self.values.gathered.add(parameter)
                here = parameter.dtype == unit.parameter_dtype
                parameter.data = parameter.data.clone() if here else self._whole(parameter)

    def _require_room(self, parameters: Sequence[Any]) -> None:
        """Raise SlideError where the GPU cannot hold all parameters, before any of them is there."""
        device = self._runtime.device
        if not device.is_cuda or len(parameters) < 2:
            return
        needed = sum(
            self.places[parameter][1].numel * self.places[parameter][0].parameter_dtype.itemsize
            for parameter in parameters
            if parameter.ds_status != ZeroParamStatus.AVAILABLE or self.places[parameter][0].resident is not None
        )
        (free,) = self._runtime.parts.context.ranks.least([device.memory()[0] - needed])
        free += needed  # the rank with the least memory counts: all ranks refuse, or none
        if needed > free:
            raise SlideError(
                f"gathering {len(parameters)} parameters takes {size(needed)} of the GPU, where {size(free)} are free; "
                "gather fewer at once (for TRL's generation: ds3_gather_for_generation=False, which streams the "
                "weights through the window), or lower ds_slide.window or ds_slide.gpu_states"
            )

    def _own(self, parameter: Any) -> torch.Tensor:
        """Return this rank's elements of a parameter, as a script sees them."""
        unit, entry = self.places[parameter]
        if self._runtime.has_ended:
            own = present_values.read_left(parameter.ds_tensor, entry.name)
            return nn.functional.pad(own, (0, entry.partition_numel - own.numel()))
        self._runtime.settle(unit)
        span = state_buffers.local_span(entry)
        if unit.spec.precision.narrowed:
            return state_buffers.read_values(unit, state_buffers.MASTER, span)
        return unit.state.read("weight", span)

    def _whole(self, parameter: Any) -> torch.Tensor:
        """Return the weights of a parameter that is not on the accelerator as a script sees it, in its shape."""
        return self.gathered(parameter, self._own(parameter).to(self._runtime.device.torch, copy=True))

    def gathered(self, parameter: Any, own: torch.Tensor) -> torch.Tensor:
        """Return all ranks' elements of a parameter, in its shape. `own`: this rank's. Collective over the ranks."""
        entry, world_size = self.places[parameter][1], self._runtime.parts.context.ranks.world_size
        whole = own
        if world_size > 1:
            whole = own.new_empty(world_size * own.numel())
            dist.all_gather_into_tensor(whole, own, group=self._group)
        return whole[: entry.numel].view(entry.shape)

    def whole_weights(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Return the whole weights of the engine's own `parameters`, each in its own memory. Collective for weights
        that this rank cannot read by itself."""
        mine = [parameter for parameter in parameters if parameter in self.places]
        self._require_room(mine)
        with torch.inference_mode(False), torch.no_grad():
            return {parameter: self._copied(parameter) for parameter in mine}

    def _copied(self, parameter: Any) -> torch.Tensor:
        unit, entry = self.places[parameter]
        is_here = parameter.ds_status == ZeroParamStatus.AVAILABLE and parameter.numel() == entry.numel
        if is_here and (unit.resident is None or parameter.dtype == unit.parameter_dtype):
            return parameter.detach().clone()
        state_buffers.require_stepped(self._runtime, unit, "copying a parameter")
        shared = self._shared_parts(unit)
        if shared is None:
            return self._whole(parameter)
        span = state_buffers.local_span(entry)
        whole = torch.cat([part[span] for part in shared])[: entry.numel].view(entry.shape)
        return whole.to(self._runtime.device.torch)

    def _shared_parts(self, unit: Unit) -> Sequence[torch.Tensor] | None:
        """Return all ranks' parts of the newest weights; None where this rank cannot read all of them."""
        shared = self._runtime.parts.context.shared
        parts = None if shared is None else shared.parts.get(unit.order)
        if parts is None or unit.spec.precision.narrowed or unit.state.change is not None:
            return None
        self._runtime.settle(unit)
        unit.await_others(unit.version)
        return parts

    def release(self) -> None:
        """Let go of the parameters that forwards have gathered: the backward has ended, and the weights will change."""
        parameters, self._until_backward_ends = self._until_backward_ends, []
        if parameters:
            self.partition(parameters, updated=False)

    def _take_back(self, parameters: Iterable[Any]) -> None:
        """Write the caller's values of the parameters to the state buffers."""
        ranks = self._runtime.parts.context.ranks
        if self._runtime.has_ended:
            for parameter in parameters:
                start, stop = piece(self.places[parameter][1], ranks.rank)
                present_values.write_left(parameter.ds_tensor, parameter.data.reshape(-1)[start:stop])
            return
        written: dict[int, Unit] = {}
        parameters = list(parameters)
        for parameter in parameters:
            self._runtime.settle(self.places[parameter][0])
        if parameters:
            self._runtime.begin_writing()
        for parameter in parameters:
            unit, entry = self.places[parameter]
            start, stop = piece(entry, ranks.rank)
            changed = state_buffers.write_weight(unit, entry, parameter.data.reshape(-1)[start:stop])
            if changed or ranks.world_size > 1:
                written[unit.order] = unit
        # Only after all writes: renewing a unit's GPU copy would undo writes to its other parameters.
        for unit in written.values():
            self._runtime.weights_changed(unit)

    def _settle(self, parameter: nn.Parameter) -> None:
        if not self._runtime.has_ended:
            self._runtime.settle(self.places[parameter][0])

    def _write_partition(self, parameter: Any, values: torch.Tensor) -> None:
        """Make the values that a script has put into `ds_tensor` this rank's elements of the weights. Collective where
        weights are shared."""
        unit, entry = self.places[parameter]
        state_buffers.require_stepped(self._runtime, unit, "writing to ds_tensor")
        if self._runtime.has_ended:
            present_values.write_left(parameter.ds_tensor, values)
            return
        self._runtime.settle(unit)
        self._runtime.begin_writing()
        if state_buffers.write_weight(unit, entry, values) or self._runtime.parts.context.ranks.world_size > 1:
            self._runtime.weights_changed(unit)

    def partition(self, parameters: Iterable[Any], *, updated: bool) -> None:
        """Take the parameters back from the accelerator; with `updated`, the caller's values become the weights.

        Elements whose low-precision value did not change keep their exact fp32 master.
        """
        gathered = []
        for parameter in parameters:
            if parameter not in self.places:
                parameter.partition(has_been_updated=updated)
            elif parameter.ds_status == ZeroParamStatus.AVAILABLE:
                gathered.append(parameter)
        if updated:
            self._take_back(gathered)
        for parameter in gathered:
            unit, entry = self.places[parameter]
            self.values.gathered.discard(parameter)
            if unit.resident is not None:
                absent_parameters.leave((parameter,))
                whole = unit.resident[entry.slot_offset : entry.slot_offset + entry.numel].view(entry.shape)
                parameter.data = whole
                if self._runtime.residents.is_kept(unit):
                    absent_parameters.watch((parameter,))
            elif not self._runtime.is_bound(unit):
                parameter.data = self._runtime.parts.empty.tensors[unit.parameter_dtype]
                set_availability([parameter], Binding.ABSENT)
