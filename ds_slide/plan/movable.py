"""Units whose states may go to spare GPU memory, and the slots that they leave. The engine and its forecast ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ds_slide.plan.allocations import of_gpu_sum, of_promoted, of_unit, slot_bytes, streamed, total
from ds_slide.plan.memory import Plan
from ds_slide.plan.needs import has_experts_in_parts, held_bytes, masters_of
from ds_slide.plan.spare import Movable, Slots, Summable, least_slots


def why_fixed(plan: Plan, index: int) -> str | None:
    """Return why the states of unit `index` stay where they are, as a clause; None where they may move."""
    unit = plan.units[index]
    if not plan.needs.trains:
        return "nothing is updated without an optimizer"
    if index in plan.placement.on_gpu:
        return "it was placed on the GPU when the engine was built, and has no place in host memory"
    if unit.kind == "part":
        which = "whose gradients are compressed" if masters_of(unit, plan.needs) else "of another data type or rule"
        return f"it holds a block's parameters {which}"
    if plan.needs.whole_units:
        return "a client's optimizer updates it, in host memory"
    if unit.passing_numel:
        return "its rows pass through the GPU"
    if has_experts_in_parts(unit, plan.needs):
        return "its experts move in parts"
    if not unit.largest_matrix and any(spec.state is not None and spec.dtype != torch.float32 for spec in unit.specs):
        return "its states are in a short format, which is updated by the CPU"
    return None


def may_sum(plan: Plan, index: int) -> bool:
    """Whether the gradients of unit `index` may be added up on the GPU: those that the host would add up. Rows give
    theirs in parts, and a gradient on SSD passes through a buffer for one in the data type that leaves the GPU."""
    unit, placement = plan.units[index], plan.placement
    held = held_bytes(unit, plan.needs)
    fits = index not in placement.gradients_on_ssd or held <= unit.codec.nbytes
    there = index in placement.on_gpu | placement.promoted
    return bool(held) and fits and not there and not unit.passing_numel and not masters_of(unit, plan.needs)


def summable_units(plan: Plan, forwards: int) -> list[Summable]:
    """Return the units whose gradients may be added up on the GPU, in the order in which they get sums. A step has
    `forwards` forwards.

    Outer modules get them first: without one, their gradients stay on the GPU behind a backward until they have been
    copied, 1.1 GB each of 7.6 B. Blocks follow in turn (`_in_turn`). Shares count what is not added up there yet."""
    summed, more = plan.placement.summed, forwards - 1
    there = plan.placement.on_gpu | plan.placement.promoted
    numel = {index: unit.codec.numel for index, unit in enumerate(plan.units) if index not in there}
    held = sum(numel[index] for index in numel if index not in summed)
    down = sum(numel[index] * (1 if index in summed else forwards) for index in numel)
    chosen = [index for index in numel if more > 0 and index not in summed and may_sum(plan, index)]
    turn = _in_turn(plan, chosen)
    return [
        Summable(
            index,
            of_gpu_sum(plan.units[index], plan.needs).nbytes,
            numel[index] / held,
            more * numel[index] / down,
            more,
        )
        for index in sorted(chosen, key=lambda index: (not plan.units[index].is_outer, turn.get(index, index)))
    ]


def summed_units(plan: Plan) -> list[Movable]:
    """Return the units whose gradients are added up on the GPU. The last ones lose their sums first."""
    sums = [(index, of_gpu_sum(plan.units[index], plan.needs).nbytes) for index in plan.placement.summed]
    sums.sort(key=lambda each: (not plan.units[each[0]].is_outer, -each[0]))
    return [Movable(index, nbytes, 0.0, streamed=False) for index, nbytes in sums]


def movable_states(plan: Plan, forwards: int = 1) -> list[Movable]:
    """Return the units in host memory or on SSD whose states may go to the GPU, in the order of their moves. A step has
    `forwards` forwards."""
    promoted, units = plan.placement.promoted, enumerate(plan.units)
    free = [index for index, unit in units if unit.codec.numel and index not in promoted]
    chosen = [index for index in free if why_fixed(plan, index) is None]
    return _in_order(plan, chosen, _in_turn(plan, chosen) if forwards > 1 else {})


def promoted_states(plan: Plan) -> list[Movable]:
    """Return the units whose states have moved to the GPU. The last ones leave it first."""
    return _in_order(plan, plan.placement.promoted, {})


def _in_turn(plan: Plan, chosen: Iterable[int]) -> dict[int, int]:
    """Return a number for each block among the units `chosen`, by index. The blocks with the smallest numbers, as many
    as you like, are spread evenly over the model, and so are the others.

    With several micro-batches the host adds up the gradients of the blocks that have neither states nor sums on the
    GPU. Where such blocks follow each other, backward waits for the host in front of a buffer, and the host has nothing
    to do under the other blocks. The numbers are those of the points of the van der Corput sequence, whose n-th point
    is n with its bits reversed behind the point."""
    if not (ordered := sorted(index for index in chosen if not plan.units[index].is_outer)):
        return {}
    bits = (len(ordered) - 1).bit_length()
    points = (sum((number >> bit & 1) << (bits - 1 - bit) for bit in range(bits)) for number in range(1 << bits))
    places = dict.fromkeys(point * len(ordered) >> bits for point in points)
    return {ordered[place]: number for number, place in enumerate(places)}


def _in_order(plan: Plan, candidates: Iterable[int], turn: Mapping[int, int]) -> list[Movable]:
    """Return the units with the indices `candidates`, sorted by when their states go to the GPU.

    Units on SSD come first: a tenth of their traffic can take the time of all updates in host memory. Then come outer
    modules, whose updates nothing hides, and then blocks by their number in `turn`, or by index: the first blocks of a
    forward wait longest for their updates. Shares count only what is not on the GPU yet."""
    units, needs, placement = plan.units, plan.needs, plan.placement
    there = placement.on_gpu | placement.promoted
    updated = sum(unit.codec.numel for index, unit in enumerate(units) if index not in there)
    on_ssd = {index: total(of_unit(units[index], index, needs, placement), "ssd") for index in placement.on_ssd - there}
    all_on_ssd = sum(on_ssd.values())
    return [
        Movable(
            index,
            total(of_promoted(units[index], needs), "gpu"),
            units[index].codec.numel / max(updated, 1),
            streamed=units[index].kind == "block",
            disk_share=on_ssd.get(index, 0) / max(all_on_ssd, 1),
        )
        for index in sorted(
            candidates,
            key=lambda index: (index not in placement.on_ssd, not units[index].is_outer, turn.get(index, index), index),
        )
    ]


def window_slots(plan: Plan, forwards: int) -> Slots:
    """Return the slots of the window, which serves `forwards` forwards a step. A size set by the user stays."""
    placement = plan.placement
    blocks = len(streamed(plan.units, placement))
    least, nbytes = least_slots(placement.window, plan.needs), slot_bytes(plan.units, plan.needs, placement)
    return Slots(min(placement.window, blocks), least, nbytes, blocks, 2 * forwards, plan.needs.window_grows)
