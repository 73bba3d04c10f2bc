"""`square_sum` in plain torch."""

from __future__ import annotations

import torch


def square_sum_reference(values: torch.Tensor) -> torch.Tensor:
    """[] fp64: sum of the squares of `values` [n], any floating dtype.

    Every element is widened to fp64 and squared there, which rounds nothing unless it is fp64 itself; only the
    additions round, and their order is torch's.
    """
    return values.double().square().sum()
