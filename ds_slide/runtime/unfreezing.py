"""Adds optimizer states for parameters that were frozen when the engine was built and require a gradient later.

The weights stay where they are. A unit gets longer state buffers, which begin with the old content, and a longer buffer
for its gradient. New moments are zero and new masters are the weights. If some frozen parameters stay frozen, or go to
several optimizer groups, the order of the weights after the trainable ones changes.

The memory is planned as at the start. If it does not fit, it is refused before any of it is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from ds_slide.compression.codec import Identity
from ds_slide.errors import SlideError
from ds_slide.model.layout import UnitLayout, align_up, with_later
from ds_slide.optim.muon import MuonRule
from ds_slide.plan.allocations import (
    BLOCK_RING,
    OUTER_RING,
    PIECES_RING,
    STAGED,
    STAGED_PARTS,
    of_unit,
    state_buffer_of,
)
from ds_slide.plan.host_room import host_room, local_ranks
from ds_slide.plan.memory import Plan
from ds_slide.report.log import size
from ds_slide.runtime.build import make_stagings
from ds_slide.runtime.core import running
from ds_slide.runtime.core.allocator import Allocator
from ds_slide.runtime.core.running import deferred_interrupt
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.memory.tier_moves import move
from ds_slide.store.in_memory import ClientStates, HeldInMemory, InMemory, KeptOnGpu, StatesInMemory
from ds_slide.store.state import UnitState
from ds_slide.store.tiers import GradientSink
from ds_slide.store.way_back import SpareBuffers

Groups = Mapping[nn.Parameter, int]
"""Optimizer groups of the parameters that are to be trained from now on."""
Item = TypeVar("Item")

AT_START = "let it require a gradient when deepspeed.initialize is called, and freeze it afterwards"


@dataclass(frozen=True)
class _Change:
    """The coming layout of a unit."""

    unit: Unit
    layout: UnitLayout
    codec: Identity
    order: Sequence[int]
    """The old index of each entry."""
    names: Sequence[str]
    """The names of the newly trained parameters."""

    @property
    def moves_weights(self) -> bool:
        return list(self.order) != sorted(self.order)

    def reordered(self, items: Sequence[Item]) -> list[Item]:
        return [items[place] for place in self.order]


def give_states(runtime: SlideRuntime, groups: Groups) -> None:
    """Give the parameters of `groups` states, before a forward. Raises SlideError, with nothing changed, where that is
    not possible.

    Collective: all ranks call it with the same parameters.
    """
    changes = [_change(unit, groups) for unit in runtime.units if any(each in groups for each in unit.parameters)]
    for change in changes:
        _require_possible(runtime, change)
    ranks = runtime.parts.context.ranks
    if ranks.world_size > 1:
        names = sorted(name for change in changes for name in change.names)
        ranks.require_equal({"the list of parameters": names}, f"what is trained from now on ({names[0]}, ...)")
    _demote(runtime, changes)
    plan = _planned(runtime, changes)
    _require_room(runtime, plan, changes[0].names[0])
    with deferred_interrupt(), torch.inference_mode(False):
        _settle(runtime, changes)
        try:
            for change in changes:
                _give(runtime, change, plan)
            _fit_buffers(runtime, plan)
        except torch.OutOfMemoryError as error:
            raise SlideError(f"GPU tier: no memory for parameters that are trained from now on: {error}") from error
        runtime.parts.plan = plan
        runtime.device.synchronize()  # new memory was zeroed on this thread's stream


def _change(unit: Unit, groups: Groups) -> _Change:
    by_name = {
        entry.name: groups[parameter]
        for parameter, entry in zip(unit.parameters, unit.layout.entries, strict=True)
        if parameter in groups
    }
    layout = with_later(unit.layout, by_name)
    place = {entry.name: number for number, entry in enumerate(unit.layout.entries)}
    codec = Identity(layout, unit.codec.dtype)
    return _Change(unit, layout, codec, [place[entry.name] for entry in layout.entries], list(by_name))


# ---- what stands against it ------------------------------------------------------------------------------------------


def _require_possible(runtime: SlideRuntime, change: _Change) -> None:
    unit, name = change.unit, change.names[0]
    reason, way_out = None, AT_START
    if isinstance(unit.state.optimizer, ClientStates):
        reason = "the script's own optimizer has been copied for the parameters that required one"
    elif isinstance(runtime.parts.context.settings.rule, MuonRule):
        reason = "Muon or AdamW has been chosen for each parameter that required one"
    elif not isinstance(unit.codec, Identity) or (
        unit.spec.kind != "outer" and any(each.state.writes_change for each in runtime.units)
    ):
        reason = "ds_slide.compression is set, and it chooses the matrices when the engine is built"
    elif not all(buffer.tensor is not None for buffer in unit.state.buffers.values()):
        reason = f"{unit.name} is on SSD"
    elif as_bytes := [name for name in change.names if name in unit.spec.as_bytes]:
        reason = f"{as_bytes[0]} moves with the packed weights of {unit.name}, as bytes without states"
    elif experts := [name for name in change.names if name in unit.experts]:
        reason, way_out = f"{experts[0]} moves in parts (ds_slide.experts)", f"{AT_START}, or set ds_slide.experts to 0"
    elif unit.chunk_rows:
        reason = f"the rows of {unit.name} pass through the GPU (ds_slide.stream_head)"
    elif runtime.accumulation.is_open:
        reason, way_out = "a backward is under way", "change requires_grad between engine.step() and the next forward"
    elif change.moves_weights and any(each.awaits_backward for each in runtime.units):
        reason = "the backward of an earlier forward is still to come"
        way_out = "change requires_grad between engine.step() and the next forward"
    if reason is not None:
        raise SlideError(
            f"parameter {name} requires a gradient since deepspeed.initialize, but optimizer states cannot be made for "
            f"it: {reason}; {way_out}"
        )


def _demote(runtime: SlideRuntime, changes: Sequence[_Change]) -> None:
    """Move promoted units back to their planned places."""
    promoted = {unit.order for unit in runtime.units if unit.home is not None}
    stay = promoted - {change.unit.order for change in changes}
    if stay != promoted and move(runtime, frozenset(stay | runtime.parts.plan.placement.on_gpu)) is None:
        raise SlideError(
            f"parameter {changes[0].names[0]} requires a gradient since deepspeed.initialize, but gradients of its "
            "unit are accumulated on the GPU; change requires_grad between engine.step() and the next forward"
        )


def _planned(runtime: SlideRuntime, changes: Sequence[_Change]) -> Plan:
    plan = runtime.parts.plan
    units, changed = list(plan.units), frozenset(change.unit.order for change in changes)
    for change in changes:
        size = units[change.unit.order]
        units[change.unit.order] = replace(size, layout=change.layout, codec=change.codec)
    # A way back is as long as the unit's states. Without a way back its updates begin when the norm is known.
    logs, spares = plan.placement.undo_logs - changed, plan.placement.spare_states - changed
    summed = plan.placement.summed - changed
    return Plan.of(units, plan.needs, replace(plan.placement, undo_logs=logs, spare_states=spares, summed=summed))


def _require_room(runtime: SlideRuntime, plan: Plan, name: str) -> None:
    parts, limits = runtime.parts, runtime.parts.context.settings.slide
    # While a unit's state buffers are copied, the old ones are there as well.
    longest = max(unit.state_bytes for unit in parts.plan.units)
    more = plan.host_bytes - parts.plan.host_bytes + longest
    if not parts.context.device.is_cuda:
        more += plan.gpu_bytes - parts.plan.gpu_bytes
    room = host_room(local_ranks(), running.untouched_host_bytes())
    (free,) = parts.context.ranks.least([room.nbytes])
    taken, own = running.taken(), parts.taken
    if more > free:
        raise SlideError(
            f"host tier: parameter {name} and what else is unfrozen need {size(more)}, but {size(free)} are free "
            f"({room.source}), {size(more - free)} short; leave more parameters frozen"
        )
    host = plan.host_state_bytes + taken.host_states - own.host_states
    if limits.host_memory is not None and host > limits.host_memory:
        raise SlideError(
            f"host tier: with parameter {name} and what else is unfrozen all states need {size(host)}, but "
            f"ds_slide.host_memory is {size(limits.host_memory)}, {size(host - limits.host_memory)} short; "
            "leave more parameters frozen, or allow more"
        )
    gpu = plan.gpu_bytes + taken.gpu - own.gpu
    if limits.gpu_memory is not None and gpu > limits.gpu_memory:
        raise SlideError(
            f"GPU tier: with parameter {name} and what else is unfrozen buffers and states need {size(gpu)}, but "
            f"ds_slide.gpu_memory is {size(limits.gpu_memory)}, {size(gpu - limits.gpu_memory)} short; "
            "leave more parameters frozen, or allow more"
        )


# ---- one unit --------------------------------------------------------------------------------------------------------


def _settle(runtime: SlideRuntime, changes: Sequence[_Change]) -> None:
    """Wait until no lane, rank or stream uses the units or the buffers of gradients."""
    runtime.access.take_back(runtime.units)
    for change in changes:
        runtime.access.settle(change.unit)
    runtime.access.begin_writing()
    workers = runtime.parts.context.lanes
    for lane in (workers.d2h, workers.update, workers.h2d, workers.outer_h2d):
        lane.drain()
    runtime.parts.context.ranks.join()
    runtime.device.synchronize()


def _give(runtime: SlideRuntime, change: _Change, plan: Plan) -> None:
    unit, counts, before = change.unit, change.unit.trained.counts, change.unit.codec.numel
    _release_way_back(runtime, unit)
    unit.gradient.gpu_sum = None  # too short; what was in it is in the held gradient
    state = _longer(runtime, change, plan)
    if change.moves_weights:
        _move_weights(change)
    unit.lay_out(change.layout, change.reordered(unit.parameters), state, change.codec)
    unit.trained.counts = [*counts, *[0] * (len(unit.trainable) - len(counts))]
    if state.has("remainder") and state.dtype_of("remainder").is_floating_point:  # the masters of fp16 weights
        later = slice(before, unit.codec.numel)
        state.write("remainder", later, state.raw("weight", later).float())
    if change.moves_weights:
        _show(runtime, unit)


def _longer(runtime: SlideRuntime, change: _Change, plan: Plan) -> UnitState:
    """Return the states of the unit with room for all trained parameters."""
    unit, memory, old = change.unit, runtime.parts.context.memory, change.unit.state
    entries = of_unit(plan.units[unit.order], unit.order, plan.needs, plan.placement)
    allocator = Allocator(entries, memory, runtime.device)

    def longer(name: str) -> InMemory:
        before = old.buffers[name].tensor
        assert before is not None
        made = allocator.tensor(state_buffer_of(unit.name, name), before.dtype)
        made[: before.numel()].copy_(before)
        if old.buffers[name].tier == "host":
            memory.give_back(before, transfers=name == "gradient")
        return InMemory(made, old.buffers[name].tier)

    states = StatesInMemory(old.specs, {spec.name: longer(spec.name) for spec in old.specs})
    sink: GradientSink = old.gradient
    if old.has("gradient"):
        sink = (KeptOnGpu if old.buffers["gradient"].tier == "gpu" else HeldInMemory)(longer("gradient"))
    return UnitState(old.specs, old.weights, states, sink)


def _move_weights(change: _Change) -> None:
    """Move the weights into the new order. On the GPU they get other memory, because graphs may have saved the old
    memory."""
    unit, buffer = change.unit, change.unit.state.weights.buffer
    assert isinstance(buffer, InMemory)
    old, moved = buffer.tensor, buffer.tensor.clone()
    for entry, before in zip(change.layout.entries, change.reordered(unit.layout.entries), strict=True):
        numel = align_up(entry.items(entry.partition_numel))
        moved[entry.offset : entry.offset + numel].copy_(old[before.offset : before.offset + numel])
    if buffer.tier == "gpu":
        unit.resident = moved if unit.resident is old else unit.resident
        buffer.tensor = moved
    else:
        old.copy_(moved)  # other ranks have this memory mapped
    if unit.resident is not None and unit.resident is not moved:
        unit.resident = torch.empty_like(unit.resident)


def _show(runtime: SlideRuntime, unit: Unit) -> None:
    """Give the new places of the unit's parameters to the window and to other users of them."""
    if runtime.parts.window is not None:
        runtime.parts.window.lay_out_anew(unit)
    runtime.access.weights_changed(unit)
    runtime.parts.context.clients.adopt(unit)
    if unit.resident is not None:
        runtime.resident_weights.bind(unit)


def _release_way_back(runtime: SlideRuntime, unit: Unit) -> None:
    way_back, unit.way_back = unit.way_back, None
    memory = runtime.parts.context.memory
    if isinstance(way_back, SpareBuffers):
        for name, buffer in way_back.spare.items():
            memory.give_back(buffer.tensor, transfers=name == "weight")
    elif way_back is not None:
        memory.give_back(way_back.memory, transfers=False)


# ---- buffers that units share ----------------------------------------------------------------------------------------


def _fit_buffers(runtime: SlideRuntime, plan: Plan) -> None:
    """Replace the buffers of gradients where a gradient is longer now."""
    parts = runtime.parts
    entries = [each for each in plan.allocations if each.what in (STAGED, STAGED_PARTS)]
    if not parts.gradients.holds(entries[0].piece, entries[-1].piece):  # one rank has one entry for both
        allocator = Allocator(entries, parts.context.memory, runtime.device)
        parts.gradients.use(make_stagings(allocator, parts.context.ranks.world_size, parts.context.failures))
    context = parts.context
    for what in (BLOCK_RING, OUTER_RING, PIECES_RING):
        entry, pool = plan.entry(what), context.allocator.pools[what]
        if entry.count and (entry.count > len(pool.addresses) or entry.piece > pool.buffer_bytes):
            larger = Allocator([entry], context.memory, context.device)
            context.allocator.pools[what] = larger.pool(what, context.failures)
            pool.close()
