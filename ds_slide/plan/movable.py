"""Units whose states may go to spare GPU memory. The engine and its forecast choose among them."""

from __future__ import annotations

from collections.abc import Iterable

from ds_slide.plan.allocations import of_promoted, of_unit, total
from ds_slide.plan.memory import Plan
from ds_slide.plan.spare import Movable


def movable_states(plan: Plan, candidates: Iterable[int]) -> list[Movable]:
    """Return the units with the indices `candidates`, sorted by when their states go to the GPU.

    Units on SSD come first: a tenth of their traffic can take the time of all updates in host memory. Then come outer
    modules, whose updates nothing hides, and then blocks by index. Shares count only what is not on the GPU yet."""
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
            candidates, key=lambda index: (index not in placement.on_ssd, not units[index].is_outer, index)
        )
    ]
