"""Makes the units of a runtime: their states where the plan has them, filled with the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ds_slide.model.layout import Entry
from ds_slide.optim.reference import encode_split
from ds_slide.plan.allocations import state_buffer_of, whole_weights_of
from ds_slide.runtime.build_context import BuildContext
from ds_slide.runtime.ranks.collectives import Ranks
from ds_slide.runtime.settings import UnitPlan
from ds_slide.runtime.transfers.handoff import Future
from ds_slide.runtime.unit import Unit
from ds_slide.store.ssd.unit import SsdUnit, page_buffer
from ds_slide.store.state import Tier, UnitState

SPLIT_NUMEL = 1 << 22
"""Of narrowed weights that are split at once: 16 MiB a temporary."""

TakeWeights = Callable[[nn.Parameter, Entry], torch.Tensor]
"""This rank's elements of a parameter, flat, on any device ([<= partition_numel])."""


def make_unit(context: BuildContext, unit_plan: UnitPlan, order: int, ssd: SsdUnit | None) -> Unit:
    """Unit number `order`, with zeroed states. `ssd`: its places on SSD, None where it has none."""
    settings, precision, name = context.settings, unit_plan.spec.precision, unit_plan.spec.name
    several, on_gpu = context.ranks.world_size > 1, order in context.plan.placement.on_gpu
    codec, held = unit_plan.codec, settings.held_of(precision)
    state = _make_state(context, unit_plan, ssd, (held or codec.dtype) if on_gpu else held)
    first = Future.kept(context.failures)
    unit = Unit(unit_plan.spec, unit_plan.layout, unit_plan.parameters, state, order, first, codec, held)
    unit.chunk_rows = unit_plan.chunk_rows
    unit.is_gathered = several and (context.shared is None or on_gpu or state.weight is None)
    if on_gpu and not several:
        unit.resident = state.weight
    elif context.allocator.tier(whole_weights_of(name)) is not None:
        unit.resident = context.allocator.tensor(whole_weights_of(name), unit_plan.dtype)
    return unit


def _make_state(
    context: BuildContext, unit_plan: UnitPlan, ssd: SsdUnit | None, gradient_dtype: torch.dtype | None
) -> UnitState:
    """`gradient_dtype`: of a gradient that is held, or stays on the GPU; None where there is none."""
    allocator, name, specs = context.allocator, unit_plan.spec.name, context.settings.specs(unit_plan.dtype)
    on_gpu = allocator.tier(state_buffer_of(name, "weight")) == "gpu"
    # The weights that other ranks read are in memory that they can map.
    shared = None if on_gpu or context.shared is None else context.shared.memory
    tier: Tier = "gpu" if on_gpu else "ssd" if ssd is not None and ssd.has_chunks else "host"
    gradient = weight = None
    if gradient_dtype is not None and not (ssd is not None and ssd.has_gradient):
        gradient = allocator.tensor(state_buffer_of(name, "gradient"), gradient_dtype)
    if ssd is None or not ssd.has_weight:
        weight = allocator.tensor(state_buffer_of(name, "weight"), unit_plan.dtype, shared)
    state_buffers = {}
    if tier != "ssd":
        state_buffers = {spec.name: allocator.tensor(state_buffer_of(name, spec.name), spec.dtype) for spec in specs}
    return UnitState(tier, specs, weight, state_buffers, gradient, ssd)


def join_parts(units: Sequence[Unit]) -> None:
    """Tell blocks which units are parts of them."""
    block_of = {unit.spec.module: unit for unit in units if unit.spec.kind == "block"}
    for unit in units:
        if unit.spec.kind == "part":
            block_of[unit.spec.module].parts.append(unit)


def load_weights(unit: Unit, ranks: Ranks, take_weights: TakeWeights) -> None:
    """Fill the weights' state buffer, and what completes it to the masters: of fp16 weights these themselves, of
    narrowed ones the remainders. Other state buffers start at zero and are zero already: new memory, and the unwritten
    parts of a preallocated file."""
    state, ssd = unit.state, unit.state.ssd
    weight = state.weight
    if weight is None:
        assert ssd is not None
        state_buffer = page_buffer(ssd.extents.weight_bytes)
        weight = ssd.weight_view(state_buffer)
    for parameter, entry in zip(unit.parameters, unit.layout.entries, strict=True):
        own = take_weights(parameter, entry).detach().reshape(-1)
        if unit.spec.precision.narrowed:
            _load_narrowed(unit, entry.offset, own, weight)
        else:
            weight[entry.offset : entry.offset + own.numel()].copy_(own)
    if state.weight is None:
        assert ssd is not None
        ssd.write("weight", slice(0, weight.numel()), weight)
    if any(spec.name == "remainder" and spec.dtype.is_floating_point for spec in state.specs):
        state.write("remainder", slice(0, unit.layout.trainable_numel), weight[: unit.layout.trainable_numel].float())
    if unit.resident is not None and ranks.world_size == 1:
        unit.resident.copy_(weight)


def _load_narrowed(unit: Unit, offset: int, values: torch.Tensor, weight: torch.Tensor) -> None:
    """Split fp32 `values` into weights and remainders, in pieces: the encoding works in 32-bit integers."""
    for start in range(0, values.numel(), SPLIT_NUMEL):
        piece = values[start : start + SPLIT_NUMEL].float()
        high, low = encode_split(piece)
        place = slice(offset + start, offset + start + piece.numel())
        weight[place].copy_(high.view(weight.dtype))
        unit.state.write("remainder", place, low)
