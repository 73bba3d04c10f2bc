"""A host whose memory does not take the held gradients of all blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ds_slide.plan.memory import Budgets, Plan, make_plan
from ds_slide.plan.needs import Needs, UnitSize
from ds_slide.plan.placement import USABLE_SHARE, place_on_host


@contextmanager
def room_for_gradients_of(blocks: int | None) -> Iterator[Callable[[], Plan]]:
    """Engines with an SSD tier find host memory for the held gradients of so many blocks of one size, when all else
    that may has gone to SSD; None: of all. Gives the plan of the latest one."""

    plans: list[Plan] = []

    def tight(units: Sequence[UnitSize], needs: Needs, budgets: Budgets) -> Plan:
        if needs.ssd is not None and blocks is not None:
            least = Plan.of(units, needs, place_on_host(units, needs, frozenset(), 0, 0)).host_bytes
            size = max(unit.layout.trainable_numel for unit in units if not unit.is_outer) * needs.held_bytes
            free = int((least + blocks * size) / USABLE_SHARE) + 2
            # As on a GPU: what the accelerator computes in is not a part of it.
            budgets = replace(budgets, host_free=free, gpu_is_own=True)
        plans.append(make_plan(units, needs, budgets))
        return plans[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds_slide.integration.assemble.make_plan", tight)
        yield lambda: plans[-1]
