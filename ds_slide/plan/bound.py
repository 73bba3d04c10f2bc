"""Which lane bounds a step beside the computation, before any step has run: from a plan and measured ceilings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_slide.plan.ceilings import Ceilings, DiskCeilings
from ds_slide.plan.memory import Plan
from ds_slide.plan.rates import Rates
from ds_slide.plan.step_model import step_of
from ds_slide.plan.step_work import work_of
from ds_slide.plan.trace import StepTrace

_NO_COMPUTATION = StepTrace(forward=(), backward=(), saved_bytes=0, peak_bytes=0)


@dataclass(frozen=True)
class Bound:
    """The busiest lane of a step. `ranks`: on this host. `measured`: as many were measured at once."""

    lane: str
    seconds: float
    ranks: int
    measured: bool

    def __str__(self) -> str:
        by = ""
        if self.ranks > 1 and self.measured:
            by = f" with {self.ranks} ranks at once"
        elif self.ranks > 1:
            by = f" with a part for each of {self.ranks} ranks, which `ds-slide doctor --ranks {self.ranks}` measures"
        return f"beside the computation the {self.lane} lane bounds a step, at {self.seconds:.3g} s{by}"


def bound_of(
    plan: Plan, ceilings: Ceilings, ranks: int, *, on_gpu: bool, micro_batches: int, disks: Sequence[Path]
) -> Bound | None:
    """Return what bounds a step with its states where the plan puts them. None where nothing moves, or where a disk was
    not measured. `disks`: directories of the states on SSD."""
    if plan.placement.on_ssd:
        found = [_that_has(path, ceilings) for path in disks]
        ceilings = ceilings.model_copy(update={"disks": tuple(disk for disk in found if disk is not None)})
        if len(ceilings.disks) < len(found):
            return None
    rates = Rates.of(ceilings.of_rank(ranks), on_gpu=on_gpu)
    work = work_of(plan, _NO_COMPUTATION, rates, micro_batches, two=False)
    lanes = dict(step_of(work, "deferred" if work.held else "under backward").lanes)
    del lanes["compute"]
    lane = max(lanes, key=lambda name: lanes[name])
    return Bound(lane, lanes[lane], ranks, ceilings.measured(ranks) is not None) if lanes[lane] else None


def _that_has(path: Path, ceilings: Ceilings) -> DiskCeilings | None:
    """Return the measured disk that has `path`."""
    for disk in ceilings.disks:
        if os.path.exists(disk.path) and os.stat(disk.path).st_dev == os.stat(path).st_dev:
            return disk
    return None
