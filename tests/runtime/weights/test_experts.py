"""Copies of experts, and results that a recomputation takes from the forward."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_slide.runtime.core.unit import KeptResults
from ds_slide.runtime.weights.experts import _runs


@given(st.sets(st.integers(0, 30)))
def test_neighbours_are_one_copy(chosen: set[int]) -> None:
    numbers = sorted(chosen)
    runs = list(_runs(numbers))
    assert [numbers[place] for start, stop in runs for place in range(start, stop)] == numbers
    for start, stop in runs:
        assert numbers[start:stop] == list(range(numbers[start], numbers[start] + stop - start))
    assert all(numbers[second[0]] > numbers[first[1] - 1] + 1 for first, second in itertools.pairwise(runs))


def test_a_recomputation_takes_the_results_of_the_forward() -> None:
    results, made = KeptResults(), [torch.ones(2), torch.full((2,), 2.0)]
    results.begin((1, 1))
    for each in made:
        assert results.take() is None
        results.put(each)
        each.add_(10.0)  # as a model that adds in place
    for _ in range(2):  # a second backward recomputes again
        results.begin((1, 1))
        for expected in (1.0, 2.0):
            found = results.take()
            assert found is not None and found.tolist() == [expected] * 2
            results.put(found)
            found.add_(10.0)
        assert results.take() is None


def test_results_of_other_weights_are_dropped() -> None:
    results = KeptResults()
    results.begin((1, 1))
    results.put(torch.ones(2))
    results.begin((1, 2))
    assert results.take() is None
    results.put(torch.zeros(2))
    results.begin((1, 2))
    found = results.take()
    assert found is not None and found.tolist() == [0.0, 0.0]
