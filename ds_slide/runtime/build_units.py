"""Makes the units of a runtime, with their states where the plan has them, filled with the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ds_slide.compression.codec import CHANGE_DTYPE
from ds_slide.compression.lsp.codec import Lsp
from ds_slide.optim.client import ClientRule
from ds_slide.optim.reference import encode_split
from ds_slide.plan.allocations import (
    CHANGES,
    CLIENT_STATES,
    COMPRESSING,
    spare_buffer_of,
    state_buffer_of,
    undo_log_of,
    undo_runs,
    whole_weights_of,
)
from ds_slide.plan.needs import has_experts_in_parts
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import Future
from ds_slide.runtime.core.settings import UnitPlan
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.ssd.ssd import UnitsOnSsd
from ds_slide.store.in_memory import (
    ClientStates,
    HeldInMemory,
    InMemory,
    KeptOnGpu,
    NotHeld,
    PartOfWeightsOnGpu,
    PartOfWhole,
    StatesInMemory,
    WeightsInMemory,
    WeightsOnGpu,
    WholeStates,
)
from ds_slide.store.memory_file import SharedHostMemory
from ds_slide.store.state import UnitState
from ds_slide.store.state_buffers import REMAINDER_DTYPE, StateBufferSpec
from ds_slide.store.tiers import GradientSink, OptimizerStates, StateBuffer, Weights
from ds_slide.store.way_back import SpareBuffers, UndoLog, WayBack


def make_unit(context: Context, unit_plan: UnitPlan, order: int, ssd: UnitsOnSsd) -> Unit:
    """Make the unit with index `order`, with zeroed states. `ssd`: the states that are on SSD."""
    settings, precision, name = context.settings, unit_plan.spec.precision, unit_plan.spec.name
    several, on_gpu = context.ranks.world_size > 1, order in context.plan.placement.on_gpu
    held = settings.held_of(precision)
    if on_gpu:
        state = _state_on_gpu(context, unit_plan, held or unit_plan.codec.dtype)
    else:
        state = _state(context, unit_plan, order, ssd)
    in_parts = has_experts_in_parts(context.plan.units[order], context.plan.needs)
    unit = Unit(unit_plan, order, state, Future.completed(context.failures), held, experts_in_parts=in_parts)
    unit.way_back = _way_back(context, unit, keeps_weight=several)
    unit.is_gathered = several and (context.shared is None or on_gpu or order in ssd.weights)
    if state.writes_change or (on_gpu and not several):
        unit.resident = state.weights.buffer.tensor
    elif context.allocator.tier(whole_weights_of(name)) is not None:
        unit.resident = context.allocator.tensor(whole_weights_of(name), unit_plan.dtype)
    return unit


def _way_back(context: Context, unit: Unit, *, keeps_weight: bool) -> WayBack | None:
    allocator, name, state, runs = context.allocator, unit.name, unit.state, undo_runs(unit.codec)
    if allocator.tier(undo_log_of(name)) is not None:
        memory = allocator.tensor(undo_log_of(name), torch.uint8)
        return UndoLog.of(memory, unit.dtype, state.specs, runs, keeps_weight=keeps_weight)
    if allocator.tier(spare_buffer_of(name, "weight")) is None:
        return None
    own = {key: each for key, each in state.buffers.items() if key != "gradient" and isinstance(each, InMemory)}
    spare = {key: InMemory(allocator.tensor(spare_buffer_of(name, key), each.dtype)) for key, each in own.items()}
    return SpareBuffers(runs, state.specs, own, spare)


def _state_on_gpu(context: Context, unit_plan: UnitPlan, gradient_dtype: torch.dtype) -> UnitState:
    specs = context.settings.specs(unit_plan.dtype, unit_plan.rule(context.settings))
    dtypes = {"weight": unit_plan.dtype, **{spec.name: spec.dtype for spec in specs}, "gradient": gradient_dtype}
    buffers = {
        name: context.allocator.tensor(state_buffer_of(unit_plan.spec.name, name), dtype)
        for name, dtype in dtypes.items()
    }
    return state_on_gpu(specs, buffers, context.device)


def state_on_gpu(specs: Sequence[StateBufferSpec], buffers: Mapping[str, torch.Tensor], device: Device) -> UnitState:
    """Return states that are updated on the GPU. `buffers`: GPU memory for the weights ("weight"), for the states of
    `specs` and for the gradient ("gradient"), by name."""
    on_gpu = {name: InMemory(buffer, "gpu") for name, buffer in buffers.items()}
    return UnitState(
        specs,
        WeightsOnGpu(on_gpu["weight"], device.synchronize),
        StatesInMemory(specs, {spec.name: on_gpu[spec.name] for spec in specs}),
        KeptOnGpu(on_gpu["gradient"]),
    )


def _state(context: Context, unit_plan: UnitPlan, order: int, ssd: UnitsOnSsd) -> UnitState:
    """Return the states of a unit; states that are not in `ssd` are in host memory."""

    def on_host(name: str, dtype: torch.dtype, memory: SharedHostMemory | None = None) -> InMemory:
        return InMemory(context.allocator.tensor(state_buffer_of(unit_plan.spec.name, name), dtype, memory))

    specs = unit_plan.specs(context.settings)
    # The buffer that updates write and other ranks read is in memory that they can map.
    shared = None if context.shared is None else context.shared.memory
    held = context.settings.held_of(unit_plan.spec.precision)
    weights: Weights | None = ssd.weights.get(order)
    optimizer: OptimizerStates | None = ssd.optimizer.get(order)
    gradient: GradientSink | None = ssd.gradients.get(order)
    if gradient is None:
        gradient = NotHeld() if held is None else HeldInMemory(on_host("gradient", held))
    if optimizer is None:
        buffers = {spec.name: on_host(spec.name, spec.dtype) for spec in specs}
        optimizer = _states_in_memory(context, unit_plan, order, buffers)
    if context.allocator.tier(state_buffer_of(unit_plan.spec.name, "change")) is not None:
        change = WeightsInMemory(on_host("change", CHANGE_DTYPE, shared))
        weight, masters = _masters_on_gpu(context, unit_plan)
        return UnitState(specs, weight, optimizer, gradient, change, masters)
    if weights is None:
        weights = WeightsInMemory(on_host("weight", unit_plan.dtype, shared))
    return UnitState(specs, weights, optimizer, gradient)


def _states_in_memory(
    context: Context, unit_plan: UnitPlan, order: int, buffers: Mapping[str, InMemory]
) -> OptimizerStates:
    """Return the optimizer states of a unit in host memory, with the copy of a client's optimizer if there is one."""
    specs, rule, what = unit_plan.specs(context.settings), context.settings.rule, unit_plan.spec.name
    if not isinstance(rule, ClientRule):
        by_elements = not context.plan.units[order].largest_matrix
        return StatesInMemory(specs, buffers) if by_elements else WholeStates(specs, buffers)
    if context.allocator.tier(state_buffer_of(what, CLIENT_STATES)) is not None:
        context.allocator.begun(state_buffer_of(what, CLIENT_STATES))
    return ClientStates(specs, buffers, rule.of_unit(unit_plan.members))


def _masters_on_gpu(context: Context, unit_plan: UnitPlan) -> tuple[Weights, dict[str, StateBuffer]]:
    """Return the weights of a unit with compressed gradients, and the remainders that complete them to masters, unless
    the weights are the masters. Both are whole on the GPU of every rank."""
    synchronize = context.device.synchronize
    low = None if context.plan.needs.rounds_masters else REMAINDER_DTYPE[unit_plan.dtype]

    def whole(name: str, dtype: torch.dtype) -> torch.Tensor:
        return context.allocator.tensor(state_buffer_of(unit_plan.spec.name, name), dtype)

    def part(name: str, dtype: torch.dtype) -> PartOfWhole:
        return PartOfWhole.of(whole(name, dtype), unit_plan.layout, context.ranks.rank)

    masters: dict[str, StateBuffer]
    if context.ranks.world_size > 1:
        masters = {} if low is None else {"remainder": part("remainder", low)}
        return PartOfWeightsOnGpu(part("weight", unit_plan.dtype), synchronize), masters
    masters = {} if low is None else {"remainder": InMemory(whole("remainder", low), "gpu")}
    return WeightsOnGpu(InMemory(whole("weight", unit_plan.dtype), "gpu"), synchronize), masters


def begin_codecs(context: Context, unit_plans: Sequence[UnitPlan]) -> None:
    """Give the compressing codecs their GPU buffers."""
    allocator = context.allocator
    if allocator.tier(CHANGES) is None:
        return
    encoding, applying = allocator.tensor(COMPRESSING, torch.uint8), allocator.tensor(CHANGES, CHANGE_DTYPE)
    for unit_plan in unit_plans:
        if isinstance(unit_plan.codec, Lsp):
            allocator.begun(state_buffer_of(unit_plan.spec.name, "projectors"))
            unit_plan.codec.begin(context.device.torch, encoding, applying)


def join_parts(units: Sequence[Unit]) -> None:
    """Tell blocks which units are their parts."""
    block_of = {unit.spec.module: unit for unit in units if unit.spec.kind == "block"}
    for unit in units:
        if unit.spec.kind == "part":
            block_of[unit.spec.module].parts.append(unit)


def load_weights(unit: Unit, context: Context) -> None:
    """Fill the weights' state buffer and the buffer that completes it to masters: the masters themselves for fp16
    weights, the remainders for narrowed weights. Other state buffers start at zero, and new memory and unwritten parts
    of a preallocated file are zero already."""
    state, numel = unit.state, unit.layout.trainable_numel
    with state.weights.to_fill() as weight:
        for parameter, entry in zip(unit.parameters, unit.layout.entries, strict=True):
            own = context.clients.take_weights(parameter, entry).detach().reshape(-1)
            if unit.spec.precision.narrowed and entry.dtype is None:
                _load_narrowed(unit, entry.offset, own, weight)
            else:
                items = entry.stored(own, weight.dtype)
                weight[entry.offset : entry.offset + items.numel()].copy_(items)
        for each in unit.carried:
            if each.entry in unit.layout.carried:  # not the second name of a parameter's memory
                items = each.entry.stored(context.clients.take_carried(each.tensor, each.entry), weight.dtype)
                weight[each.entry.offset : each.entry.offset + items.numel()].copy_(items)
        if any(spec.name == "remainder" and spec.dtype.is_floating_point for spec in state.specs):
            state.write("remainder", slice(0, numel), weight[:numel].float())
        if unit.resident is not None and context.ranks.world_size == 1:
            unit.resident.copy_(weight)


def _load_narrowed(unit: Unit, offset: int, values: torch.Tensor, weight: torch.Tensor) -> None:
    """Split fp32 `values` into weights and remainders, in pieces: the encoding works in 32-bit integers, so that each
    temporary tensor has 16 MiB."""
    for piece in values.split(1 << 22) if values.numel() else ():
        high, low = encode_split(piece.float())
        place = slice(offset, offset + piece.numel())
        weight[place].copy_(high.view(weight.dtype))
        unit.state.write("remainder", place, low)
        offset = place.stop
