"""What may take spare GPU memory, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from ds_slide.plan.keeping import Keepable
from ds_slide.plan.mixtures import Run, mixtures
from ds_slide.plan.spare import Movable, Slots, Summable

_runs = st.lists(st.tuples(st.floats(0, 50), st.integers(0, 30)), max_size=5).map(
    lambda given: [Run(("run", place), *each) for place, each in enumerate(given)]
)


def _block(order: int, nbytes: int, seconds: float, runs: list[Run], mixing: float) -> Keepable:
    """`mixing`: of the seconds."""
    return Keepable(order, nbytes, seconds, mixtures(runs, nbytes), mixing * seconds)


keepables = st.lists(st.tuples(st.integers(0, 50), st.floats(0, 2), _runs, st.floats(0, 1)), max_size=6).map(
    lambda given: [_block(order, *each) for order, each in enumerate(given)]
)

movables = st.lists(st.integers(1, 50), max_size=6).map(
    lambda given: [Movable(100 + order, nbytes, 1 / (len(given) + 1)) for order, nbytes in enumerate(given)]
)
# Some of the units are among the movable ones.
summables = st.lists(st.integers(1, 20), max_size=6).map(
    lambda given: [
        Summable(103 + order, nbytes, 1 / (len(given) + 1), 0.5 / (len(given) + 1), 3)
        for order, nbytes in enumerate(given)
    ]
)
windows = st.integers(6, 12).flatmap(
    lambda blocks: st.builds(
        Slots,
        st.integers(0, blocks),
        st.integers(0, 4),
        st.integers(0, 20),
        st.just(blocks),
        st.integers(1, 8),
        st.booleans(),
    )
)
