"""The square sum of gradients of which only compressed sums are left."""

from __future__ import annotations

import math

import pytest
import torch

from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.gradients.totals import SquareSums, Totals


def totals(compressed: list[SquareSums]) -> list[float]:
    """Of an exact unit, whose square sum is 1, and of compressed ones: as `now` and as `later` have it."""
    units = [SquareSums(1.0, 0.0, 0.0), *compressed]
    both = Totals(Ranks(), Device(torch.device("cpu")), [False, *(True for _ in compressed)])
    return [both.now(units), float(both.later(torch.tensor(units, dtype=torch.float64).T.contiguous()))]


def test_compressed_sums_are_scaled_by_what_was_lost() -> None:
    # Two equal gradients, of whose squares a quarter is left; and one of which nothing is.
    assert totals([SquareSums(4.0, 8.0, 2.0), SquareSums(0.0, 3.0, 0.0)]) == [1.0 + 16.0 + 3.0] * 2


@pytest.mark.parametrize("left", [math.nan, math.inf])
def test_what_is_not_finite_once_compressed_is_not_finite(left: float) -> None:
    """Sums of finite gradients, of 1e38, may be infinite, and the sums of these NaN."""
    assert all(map(math.isnan, totals([SquareSums(left, 1.0, left)])))
