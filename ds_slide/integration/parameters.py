"""ZeRO-3's parameter protocol (`ds_id`, `ds_tensor`, `all_gather`, `partition`, ...) over DS-Slide's state buffers.

`deepspeed.zero.GatheredParameters`, Hugging Face and checkpointing reach parameters through these attributes. After
`DeepSpeedClients.adopt`, `ds_tensor` is a view of this rank's weights' state buffer, and gathering waits for a pending
update first. `absent_parameters` asks here for the value of a parameter that a script reads or writes between forwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from ds_slide.checkpoint import state_buffers
from ds_slide.errors import SlideError
from ds_slide.integration import absent_parameters
from ds_slide.integration.partitions import STOCKS_METHODS, read_left, set_availability, write_left
from ds_slide.model.carried import Divided
from ds_slide.model.layout import Entry, piece
from ds_slide.report.log import size
from ds_slide.runtime.core.context import AS_THEY_ARE, Binding
from ds_slide.runtime.core.unit import CarriedTensor, Unit
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.weights.uses import UseToken

GATHER = "inside `with deepspeed.zero.GatheredParameters([parameter]):`"


class _Gathered:
    """The handle that `all_gather_coalesced` returns; the work is done already."""

    def wait(self, *_args: Any, **_kwargs: Any) -> None:
        return None


class ParameterProtocol:
    """Gathers, partitions, reads and writes the parameters of one runtime."""

    def __init__(self, runtime: SlideRuntime, group: Any, most_elements: int) -> None:
        """`most_elements`: the limit for a parameter that is readable between forwards
        (`stage3_param_persistence_threshold`)."""
        self._runtime = runtime
        self._group = group
        self.places: dict[nn.Parameter, tuple[Unit, Entry]] = {}
        self.refresh()
        self.external: weakref.ref[Any] | None = None
        """The engine's `ExternalParameters`, which gathers parameters that a module reads though they are absent."""
        self._until_backward_ends: list[Any] = []
        """Parameters gathered because a module other than their own has read them in its forward: only `release` lets
        go of them."""
        self._most_elements = most_elements
        self._block_of = {part.order: unit for unit in runtime.units for part in unit.parts}
        self._gathered: set[nn.Parameter] = set()
        """Parameters that a script has gathered, in memory of their own."""
        for parameter in self.places:
            self._install(parameter)

    def refresh(self) -> None:
        """Take the places of the parameters from their units, where more parameters may be trainable now."""
        for unit in self._runtime.units:
            self.places |= {
                parameter: (unit, entry) for parameter, entry in zip(unit.parameters, unit.layout.entries, strict=True)
            }

    @property
    def all_stay(self) -> bool:
        """Whether all weights stay on the GPU, and are renewed there, so that no forward finds a parameter absent."""
        return all(
            unit.resident is not None and not unit.is_uploaded and not unit.is_gathered for unit in self._runtime.units
        )

    def weights_move(self) -> None:
        """Note that weights are about to leave the GPU, maybe within a forward: reads may find parameters absent."""
        external = None if self.external is None else self.external()
        if external is not None:
            external.watch_reads(True)

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
        if not hasattr(parameter, STOCKS_METHODS):  # otherwise the present methods are an earlier engine's
            setattr(parameter, STOCKS_METHODS, {method: getattr(parameter, method) for method in ours})
        for method, function in ours.items():
            setattr(parameter, method, function)
        parameter.ds_tensor.ds_slide_access = (self, parameter)
        setattr(parameter, absent_parameters.PROTOCOL, self)

    def _is_bound_in_forward(self, parameter: Any) -> bool:
        """Bind a parameter that a forward reads to its weights, if these are on the GPU anyway: a copy of a vocabulary
        matrix would stay there until the backward has ended. -> whether it is bound. A parameter that a script has cast
        gets a copy instead."""
        unit, entry = self.places[parameter]
        if unit.resident is None or parameter.dtype != unit.declared(entry) or not self._runtime.access.is_in_forward:
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
                    for each in unit.carried_with(parameter):
                        each.point_to(self._whole_carried(unit, each))
                    self._gathered.add(parameter)
                    continue
                if parameter.ds_status != ZeroParamStatus.AVAILABLE:
                    self._runtime.resident_weights.bind(unit)
                absent_parameters.leave((parameter,))
                self._gathered.add(parameter)
                here = parameter.dtype == self._declared(parameter)
                parameter.data = parameter.data.clone() if here else self._whole(parameter)

    def _declared(self, parameter: Any) -> torch.dtype:
        unit, entry = self.places[parameter]
        return unit.declared(entry)

    def _require_room(self, parameters: Sequence[Any]) -> None:
        """Raise SlideError where the GPU cannot hold all parameters, before any of them is there."""
        device = self._runtime.device
        if not device.is_cuda or len(parameters) < 2:
            return
        needed = sum(
            self.places[parameter][1].numel * self._declared(parameter).itemsize
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
        if self._runtime.access.has_ended:
            own = read_left(parameter.ds_tensor, entry.name)
            missing = entry.partition_numel - own.numel()
            return nn.functional.pad(own, (0, missing)) if missing else own
        self._runtime.access.settle(unit)
        span = entry.place
        if unit.spec.precision.narrowed and entry.dtype is None:
            return state_buffers.read_values(unit.state, state_buffers.MASTER, span)
        return entry.viewed(unit.state.read("weight", span), entry.partition_numel)

    def _whole(self, parameter: Any) -> torch.Tensor:
        """Return the weights of a parameter that is not on the accelerator as a script sees it, in its shape."""
        return self.gathered(parameter, self._own(parameter).to(self._runtime.device.torch, copy=True))

    def _whole_carried(self, unit: Unit, carried: CarriedTensor) -> torch.Tensor:
        """Return a whole copy of a carried tensor on the accelerator."""
        entry, divided = carried.entry, Divided.of(carried.tensor)
        if divided is None:
            own = carried.home
        elif self._runtime.access.has_ended:
            own = divided.own
        else:
            own = entry.viewed(unit.state.read("weight", entry.place), entry.partition_numel)
        return self._joined(entry, own.to(self._runtime.device.torch, copy=True))

    def gathered(self, parameter: Any, own: torch.Tensor) -> torch.Tensor:
        """Return all ranks' elements of a parameter, in its shape. `own`: this rank's. Collective over the ranks."""
        return self._joined(self.places[parameter][1], own)

    def _joined(self, entry: Entry, own: torch.Tensor) -> torch.Tensor:
        world_size = self._runtime.parts.context.ranks.world_size
        whole = own
        if world_size > 1:
            whole = own.new_empty(world_size * own.numel())
            # As bytes where the data type may be unknown to the backend.
            as_bytes = entry.dtype is not None
            dist.all_gather_into_tensor(
                whole.view(torch.uint8) if as_bytes else whole,
                own.contiguous().view(torch.uint8) if as_bytes else own,
                group=self._group,
            )
        return whole.reshape(-1)[: entry.numel].view(entry.shape)

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
        if is_here and (unit.resident is None or parameter.dtype == unit.declared(entry)):
            return parameter.detach().clone()
        state_buffers.require_stepped(self._runtime, unit, "copying a parameter")
        shared = self._shared_parts(unit)
        if shared is None:
            return self._whole(parameter)
        span = entry.place
        whole = torch.cat([entry.viewed(part[span], entry.partition_numel) for part in shared])
        whole = whole[: entry.numel].view(entry.shape)
        return whole.to(self._runtime.device.torch)

    def _shared_parts(self, unit: Unit) -> Sequence[torch.Tensor] | None:
        """Return all ranks' parts of the newest weights; None where this rank cannot read all of them."""
        shared = self._runtime.parts.context.shared
        parts = None if shared is None else shared.parts.get(unit.order)
        if parts is None or unit.spec.precision.narrowed or unit.state.change is not None:
            return None
        self._runtime.access.settle(unit)
        if unit.shared is not None:
            unit.shared.await_others(unit, unit.version)
        return parts

    def release(self) -> None:
        """Let go of the parameters that forwards have gathered: the backward has ended, and the weights will change."""
        parameters, self._until_backward_ends = self._until_backward_ends, []
        if parameters:
            self.partition(parameters, updated=False)

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
        try:
            if updated:
                self._write({parameter: self._part_of(parameter, parameter.data) for parameter in gathered})
        finally:
            self._take_back(gathered)

    def _take_back(self, gathered: Sequence[Any]) -> None:
        """Take the parameters' own memory away: they are the weights again, or empty."""
        for parameter in gathered:
            unit, entry = self.places[parameter]
            self._gathered.discard(parameter)
            if unit.resident is not None:
                absent_parameters.leave((parameter,))
                parameter.data = entry.viewed(unit.resident[entry.slot_place], entry.numel).view(entry.shape)
                if self._runtime.bindings.residents.is_kept(unit):
                    absent_parameters.intercept((parameter,))
            elif not self._runtime.access.is_bound(unit):
                parameter.data = self._runtime.parts.empty.tensors[unit.declared(entry)]
                set_availability([parameter], Binding.ABSENT)
                if unit.carried and not self._runtime.access.has_ended:
                    unit.bring_carried_home()

    # ---- values that scripts write -----------------------------------------------------------------------------

    def _part_of(self, parameter: Any, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of `whole`, values of the parameter. Raises SlideError where its shape is not the
        parameter's."""
        entry = self.places[parameter][1]
        if tuple(whole.shape) != tuple(entry.shape):
            raise SlideError(
                f"{entry.name} has the shape {tuple(entry.shape)}, but the value given has {tuple(whole.shape)}; give "
                "a value of the parameter's shape"
            )
        start, stop = piece(entry, self._runtime.parts.context.ranks.rank)
        return whole.reshape(-1)[start:stop]

    def _write(self, values: Mapping[Any, torch.Tensor]) -> None:
        """Make flat values this rank's elements of the weights. Elements that do not change keep their exact master.
        Collective where weights are shared."""
        runtime = self._runtime
        if runtime.access.has_ended:
            for parameter, own in values.items():
                write_left(parameter.ds_tensor, own)
            return
        for parameter in values:
            self.settle(parameter)
        if values:
            runtime.access.begin_writing()
        written: dict[int, Unit] = {}
        for parameter, own in values.items():
            unit, entry = self.places[parameter]
            if state_buffers.write_weight(unit, entry, own) or runtime.parts.context.ranks.world_size > 1:
                written[unit.order] = unit
        # Only after all writes: renewing a unit's GPU copy would undo writes to its other parameters.
        for unit in written.values():
            runtime.access.weights_changed(unit)

    def settle(self, parameter: nn.Parameter) -> None:
        """Wait until no update of the parameter is under way."""
        if not self._runtime.access.has_ended:
            self._runtime.access.settle(self.places[parameter][0])

    def write_partition(self, parameter: Any, values: torch.Tensor) -> None:
        """Make the values that a script has put into `ds_tensor` this rank's elements of the weights."""
        state_buffers.require_stepped(self._runtime, self.places[parameter][0], "writing to ds_tensor")
        self._write({parameter: values})

    def write(self, parameter: Any, value: torch.Tensor) -> None:
        """Make `value` the whole weights. Collective over the ranks."""
        own = self._part_of(parameter, value)
        if not self._runtime.access.has_ended:
            state_buffers.require_stepped(self._runtime, self.places[parameter][0], "writing to a parameter")
        self._write({parameter: own})

    # ---- the value of one parameter between forwards (`absent_parameters`) -------------------------------------
    #
    # Each call waits for the update of the parameter's unit and nothing else. A read is no collective: with shared
    # weights a rank reads the other ranks' parts of a block from their memory. A write is for all ranks together.

    def is_gathered(self, parameter: Any) -> bool:
        """Whether a script has gathered the whole parameter, in memory of its own."""
        return parameter in self._gathered and parameter.ds_status == ZeroParamStatus.AVAILABLE

    def is_small(self, parameter: Any) -> bool:
        """Whether it is so small that stock keeps it on the accelerator."""
        return self.places[parameter][1].numel <= self._most_elements

    def is_readable(self, parameter: Any) -> bool:
        """Whether `present` gives its value."""
        if parameter.ds_status == ZeroParamStatus.AVAILABLE:
            return True
        return self._refusal(*self.places[parameter], together=False) is None

    def present(self, parameter: Any, *, together: bool) -> tuple[torch.Tensor, bool]:
        """Return its value in its shape, and whether the model computes with that same memory. SlideError where there
        is no value. `together`: all ranks do the same, as in all writes."""
        unit, entry = self.places[parameter]
        if parameter.ds_status != ZeroParamStatus.AVAILABLE:
            if (refusal := self._refusal(unit, entry, together=together)) is not None:
                raise refusal
            state_buffers.require_stepped(self._runtime, unit, "computing with a parameter")
            if unit.resident is None:
                with torch.inference_mode(False), torch.no_grad():
                    return self._copied(parameter).to(parameter.dtype), False
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

    def bringer(self, parameter: Any) -> _Bringer:
        """Return a hook for a copy of its value, which brings the gradient of the copy to the parameter."""
        unit = self.places[parameter][0]
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
