"""Blocks whose activations may be kept, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from ds_slide.plan.keeping import Keepable
from ds_slide.plan.mixtures import Run, mixtures

_runs = st.lists(st.tuples(st.floats(0, 50), st.integers(0, 30)), max_size=5).map(
    lambda given: [Run(("run", place), *each) for place, each in enumerate(given)]
)


def _block(order: int, nbytes: int, seconds: float, runs: list[Run]) -> Keepable:
    return Keepable(order, nbytes, seconds, mixtures(runs, nbytes))


keepables = st.lists(st.tuples(st.integers(0, 50), st.floats(0, 2), _runs), max_size=6).map(
    lambda given: [_block(order, *each) for order, each in enumerate(given)]
)
