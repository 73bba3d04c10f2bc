"""Sparse projectors: their pattern and values, their order of columns, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_slide.compression.lsp.projector import Projector, projector_bytes, random_projector
from ds_slide.errors import SlideError


def drawn(rows: int, d: int, r: int, seed: int = 0) -> Projector:
    return random_projector(rows, d, r, torch.Generator().manual_seed(seed), "cpu")


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12), st.integers(0, 1 << 40))
def test_columns_are_distinct_and_ascend(rows: int, d: int, r: int, seed: int) -> None:
    r = min(r, d)
    projector = drawn(rows, d, r, seed)
    assert projector.indices.shape == projector.values.shape == (rows, r)
    assert (projector.indices.diff(dim=1) > 0).all()
    assert projector.indices.min() >= 0 and projector.indices.max() < d
    dense = projector.dense(torch.float64)
    assert torch.equal(dense.gather(1, projector.indices.long()), projector.values.double())
    assert dense.count_nonzero() == rows * r


def test_every_set_of_columns_and_every_value_is_as_likely_as_it_should_be() -> None:
    rows, d, r = 60_000, 5, 3
    projector = drawn(rows, d, r)
    counts = (1 << projector.indices.long()).sum(dim=1).bincount()
    counts = counts[counts > 0]
    assert len(counts) == 10
    # 6000 each with a standard deviation of 73: five of them.
    assert (counts - rows / 10).abs().max() < 5 * 73.5
    values = projector.values.double()
    assert abs(values.mean()) < 5 * (1 / (rows * r * r)) ** 0.5
    assert abs(values.square().sum(dim=1).mean() - 1) < 5 * (2 / (rows * r)) ** 0.5


def test_a_seed_gives_the_same_projector_and_another_one_another() -> None:
    first, again, other = drawn(50, 20, 4), drawn(50, 20, 4), drawn(50, 20, 4, seed=1)
    assert torch.equal(first.indices, again.indices) and torch.equal(first.values, again.values)
    assert not torch.equal(first.indices, other.indices) and not torch.equal(first.values, other.values)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 4))
def test_the_order_of_columns(rows: int, d: int, r: int) -> None:
    """Also of columns without a non-zero."""
    projector = drawn(rows, d, min(r, d))
    for column in range(d):
        start, end = projector.columns.starts[column : column + 2].tolist()
        entries = projector.columns.entries[start:end].long()
        assert (projector.indices.view(-1)[entries] == column).all()
        assert torch.equal(entries // projector.r, projector.dense()[:, column].nonzero().view(-1))
    held = (projector.indices, projector.values, projector.columns.starts, projector.columns.entries)
    assert sum(tensor.nbytes for tensor in held) == projector_bytes(rows, d, projector.r)


def test_other_values_share_the_order_of_columns() -> None:
    projector = drawn(10, 4, 2)
    columns = projector.columns
    other = projector.with_values(projector.values * 2)
    assert other.columns is columns
    assert torch.equal(other.dense(), 2 * projector.dense())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, v, d: (i.long(), v, d), "indices must be int32"),
        (lambda i, v, d: (i.T, v.T, d), "contiguous"),
        (lambda i, v, d: (i, v.double(), d), "values must be float32"),
        (lambda i, v, d: (i, v[1:], d), "values must be float32 of shape"),
        (lambda i, v, d: (i, v.to("meta"), d), "values are on meta"),
        (lambda i, v, _: (i, v, 1), "r = 2 and d = 1"),
        (lambda i, v, d: (i[:0], v[:0], d), "0 rows"),
    ],
)
def test_refusals(change, message: str) -> None:
    projector = drawn(6, 4, 2)
    with pytest.raises(SlideError, match=message):
        Projector(*change(projector.indices, projector.values, projector.d))


def test_refused_draws() -> None:
    for rows, d, r in ((3, 4, 5), (3, 4, 0), (0, 4, 1)):
        with pytest.raises(SlideError, match="needs a row, and 1 <= r <= d"):
            drawn(rows, d, r)
    with pytest.raises(SlideError, match="32-bit indices"):
        drawn(1 << 29, 8, 4)
