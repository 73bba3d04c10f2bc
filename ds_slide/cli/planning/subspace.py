"""The subspace of compressed gradients that `"d": "auto"` stands for: the largest that still hides."""

from __future__ import annotations

from typing import Any

from ds_slide.cli.planning.planner import Planner, Request
from ds_slide.config import CONFIG_KEY
from ds_slide.config.json_types import AUTO

STEP = 64
"""Of d, which is a multiple of it: rows of whole cache lines."""
HIDDEN = 1.02
"""Of what the GPU computes: transfers and updates of a step that takes no longer are hidden. Where not even those of
the smallest d are (a vocabulary matrix on a slow link), of that one's step."""


def with_subspace(planner: Planner, request: Request) -> tuple[Request, list[str]]:
    """The request with a number in the place of `"d": "auto"`, and a sentence that says which; as it is without. Raises
    as `Planner.steady`."""
    compression: Any = request.raw.get(CONFIG_KEY, {}).get("compression")
    if not isinstance(compression, dict) or compression.get("d", AUTO) != AUTO:
        return request, []

    def with_d(d: int) -> Request:
        return request.with_block(compression={**compression, "d": d})

    def hides(d: int) -> bool:
        time = planner.steady(with_d(d)).time
        return time.step_s <= HIDDEN * max(time.lanes["compute"], least)

    low, high = STEP, _most(planner, with_d(STEP))
    least = planner.steady(with_d(low)).time.step_s
    if hides(high):
        low = high
    while high - low > STEP:  # what has to be hidden grows with d
        middle = (low + high) // 2 // STEP * STEP
        low, high = (middle, high) if hides(middle) else (low, middle)
    note = f'ds_slide.compression.d is "auto" and taken for {low}, the largest that hides at this batch; write it'
    return with_d(low), [note]


def _most(planner: Planner, request: Request) -> int:
    """Half of the smaller side of the largest matrix that is compressed, in steps."""
    plans = [unit for unit in planner.planned(request).unit_plans if unit.spec.compressed]
    side = max(min(entry.shape) for unit in plans for entry in unit.layout.entries)
    return max(STEP, side // 2 // STEP * STEP)
