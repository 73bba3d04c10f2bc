"""What one of several ranks gets: as it was measured, or divided."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ds_slide.plan.ceilings import Ceilings, checked, read_ceilings
from ds_slide.plan.rank_ceilings import SHARES_BELOW, PairOfRanks, RankRates, RanksCeilings
from ds_slide.plan.rates import Rates

LINK = ("h2d_gb_s", "d2h_gb_s", "both_ways_gb_s")
HOST = read_ceilings("h200-16-cores")
DISK = HOST.disks[0].path
rates = st.floats(0.01, 1000)


def of_ranks(together: list[dict[str, float]], alone: float = 1e4, slowed: set[tuple[int, int]] | None = None) -> Any:
    """Ranks with these rates while all work, and all with `alone` while the others rest."""
    count = len(together)
    return RanksCeilings(
        alone=tuple(rank_rates(dict.fromkeys(each, alone)) for each in together),
        together=tuple(rank_rates(each) for each in together),
        places=("",) * count,
        pairs=tuple(
            PairOfRanks(ranks=(a, b), kept=0.5 if (a, b) in (slowed or ()) else 0.97)
            for a in range(count)
            for b in range(a + 1, count)
        ),
    )


def rank_rates(named: dict[str, float]) -> RankRates:
    fields = {name: rate for name, rate in named.items() if name.endswith("_s") and name != DISK}
    return RankRates(disks_gb_s={DISK: named[DISK]} if DISK in named else {}, **fields)


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[dict[str, float]], Ceilings]:
    count = draw(st.integers(2, 8))
    names = [*LINK, "update_gb_s", DISK]
    together = draw(st.lists(st.fixed_dictionaries(dict.fromkeys(names, rates)), min_size=count, max_size=count))
    return together, HOST.with_measured(of_ranks(together))


@given(machines())
def test_a_rank_has_the_rates_of_the_slowest_that_was_measured(
    machine: tuple[list[dict[str, float]], Ceilings],
) -> None:
    together, ceilings = machine
    found = Rates.of(ceilings.of_rank(len(together)), on_gpu=True)
    least = {name: 1e9 * min(each[name] for each in together) for name in together[0]}
    assert (found.h2d, found.d2h, found.both_ways) == tuple(pytest.approx(least[name]) for name in LINK)
    assert (found.update, found.ssd) == (pytest.approx(least["update_gb_s"]), pytest.approx(least[DISK]))
    assert found.copy == Rates.of(HOST, on_gpu=True).copy  # the GPU's own memory
    # A file keeps them.
    assert checked(json.loads(ceilings.text()), "") == ceilings


@given(machines(), st.integers(1, 16))
def test_what_was_not_measured_is_divided(machine: tuple[list[dict[str, float]], Ceilings], ranks: int) -> None:
    together, ceilings = machine
    if ranks == len(together):
        return
    whole, found = Rates.of(HOST, on_gpu=True), Rates.of(ceilings.of_rank(ranks), on_gpu=True)
    assert ranks * found.update == pytest.approx(whole.update) and ranks * found.ssd == pytest.approx(whole.ssd)
    assert (found.h2d, found.d2h, found.both_ways) == (whole.h2d, whole.d2h, whole.both_ways)


def test_a_processor_that_computes_is_divided_too() -> None:
    cpu = HOST.cpu.model_copy(update={"product_tflop_s": 0.4})
    here = HOST.model_copy(update={"gpu": None, "cpu": cpu})
    quarter = here.of_rank(4).cpu
    assert (quarter.product_tflop_s, quarter.copy_gb_s) == (0.1, HOST.cpu.copy_gb_s / 4)
    measured = of_ranks([{"copy_gb_s": 9.0, "product_tflop_s": 0.3, "update_gb_s": 5.0}] * 2)
    half = here.with_measured(measured).of_rank(2).cpu
    assert (half.copy_gb_s, half.product_tflop_s, half.update_gb_s) == (9.0, 0.3, 5.0)


def test_ranks_are_measured_anew_for_each_number() -> None:
    two, four = ([{"update_gb_s": rate}] * count for rate, count in ((3.0, 2), (2.0, 4)))
    both = HOST.with_measured(of_ranks(two)).with_measured(of_ranks(four))
    assert [both.of_rank(ranks).cpu.update_gb_s for ranks in (2, 4)] == [3.0, 2.0]
    again = both.with_measured(of_ranks([{"update_gb_s": 4.0}] * 2))
    assert [each.ranks for each in again.of_ranks] == [4, 2] and again.of_rank(2).cpu.update_gb_s == 4.0


@pytest.mark.parametrize(
    ("ranks", "slowed", "groups"),
    [
        (2, set(), []),
        (4, {(0, 1), (2, 3)}, [[0, 1], [2, 3]]),
        (4, {(0, 2), (1, 3)}, [[0, 2], [1, 3]]),
        (4, {(0, 3)}, [[0, 3]]),
        (8, {(a, b) for a in range(4) for b in range(a + 1, 4)}, [[0, 1, 2, 3]]),
        (4, {(0, 3), (1, 2), (2, 3)}, [[0, 1, 2, 3]]),
    ],
)
def test_ranks_that_slow_each_other_are_a_group(ranks: int, slowed: set[tuple[int, int]], groups: list[Any]) -> None:
    found = of_ranks([{"update_gb_s": 1.0}] * ranks, slowed=slowed)
    assert found.that_share() == groups and 0.5 < SHARES_BELOW < 0.97


@given(
    st.integers(2, 8).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)))))
)
def test_groups_are_what_pairs_connect(drawn: tuple[int, set[tuple[int, int]]]) -> None:
    ranks, pairs = drawn
    slowed = {(a, b) for a, b in pairs if a < b < ranks}
    groups = of_ranks([{"update_gb_s": 1.0}] * ranks, slowed=slowed).that_share()
    members = [rank for group in groups for rank in group]
    assert len(members) == len(set(members)) and set(members) == {rank for pair in slowed for rank in pair}
    assert all(any(a in group and b in group for group in groups) for a, b in slowed)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"places": [""]}, "different numbers of ranks"),
        ({"together": [{"update_gb_s": 1.0}, {"update_gb_s": 1.0, "copy_gb_s": 2.0}]}, "different lanes"),
        ({"alone": [{"update_gb_s": 1.0, "copy_gb_s": 2.0}] * 2}, "different lanes"),
        ({"pairs": [{"ranks": [0, 2], "kept": 0.9}]}, "a rank that is not there"),
        ({"pairs": [{"ranks": [0, 1], "kept": 1.5}]}, "less than or equal to 1"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(change: dict[str, Any], why: str) -> None:
    whole = of_ranks([{"update_gb_s": 1.0}] * 2).model_dump()
    RanksCeilings.model_validate(whole)
    with pytest.raises(ValidationError, match=why):
        RanksCeilings.model_validate({**whole, **change})
