"""What tells a result that somebody has written into."""

from __future__ import annotations

import pytest
import torch

from ds_slide.runtime.activations.measuring import _sum


@pytest.mark.parametrize("count", [0, 1, 7, 8, 19])
def test_the_sum_sees_each_byte_of_the_storage(count: int) -> None:
    values = torch.randint(0, 255, (count,), dtype=torch.uint8)
    before = _sum(values)
    for place in range(count):
        values[place] += 1
        assert _sum(values) != before
        values[place] -= 1
    assert _sum(values) == before == _sum(values[count // 2 :])
