"""A sparse projector: a tall matrix with the same number of non-zeros in each row.

A non-zero takes 4 bytes for its column and 4 for its value. Once the projector compresses, it takes 4 more for its
place by columns. A product with the transpose reads these places, so that it gathers and needs no atomic addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ds_slide.errors import SlideError


@dataclass(frozen=True, eq=False)
class Columns:
    """The non-zeros of a projector by column, and within a column by ascending row."""

    starts: Tensor
    """[d + 1] int32: column c has the entries [starts[c], starts[c + 1])."""
    entries: Tensor
    """[rows * r] int32: places in the flattened `indices` and `values`. The row is the place divided by r."""


@dataclass(frozen=True, eq=False)
class Projector:
    """A matrix [rows, d] with r non-zeros in each row ("(d, r)-sparse" in arXiv 2406.10181).

    Raises SlideError for tensors that do not belong together. The caller guarantees valid columns: to check them would
    wait for the GPU.
    """

    indices: Tensor
    """[rows, r] int32: columns, ascending and distinct within a row."""
    values: Tensor
    """[rows, r] fp32."""
    d: int

    def __post_init__(self) -> None:
        indices, values = self.indices, self.values
        if indices.dim() != 2 or indices.dtype != torch.int32 or not indices.is_contiguous():
            raise SlideError(
                f"Projector: indices must be int32 [rows, r] and contiguous, but they are {indices.dtype} of shape "
                f"{list(indices.shape)}."
            )
        if values.shape != indices.shape or values.dtype != torch.float32 or not values.is_contiguous():
            raise SlideError(
                f"Projector: values must be float32 of shape {list(indices.shape)} and contiguous, but they are "
                f"{values.dtype} of shape {list(values.shape)}."
            )
        if values.device != indices.device:
            raise SlideError(f"Projector: values are on {values.device}, but indices on {indices.device}.")
        _require_sizes(self.rows, self.r, self.d)

    @property
    def rows(self) -> int:
        return self.indices.shape[0]

    @property
    def r(self) -> int:
        return self.indices.shape[1]

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @cached_property
    def columns(self) -> Columns:
        """The non-zeros by column, computed at the first use, without waiting for the GPU."""
        sorted_columns, entries = self.indices.view(-1).sort(stable=True)
        wanted = torch.arange(self.d + 1, dtype=torch.int32, device=self.device)
        return Columns(torch.searchsorted(sorted_columns, wanted, out_int32=True), entries.int())

    def with_columns(self, columns: Columns) -> Projector:
        """Return this projector with its `columns`, which the caller has computed."""
        other = Projector(self.indices, self.values, self.d)
        other.__dict__["columns"] = columns
        return other

    def with_values(self, values: Tensor) -> Projector:
        """Return a projector with the same pattern. It shares the computed `columns`."""
        other = Projector(self.indices, values, self.d)
        return other.with_columns(self.columns) if "columns" in self.__dict__ else other

    def copy_(self, other: Projector) -> None:
        """Take the pattern and the values of a projector of the same shape, in place."""
        ours, theirs = ((one.indices, one.values, one.columns.starts, one.columns.entries) for one in (self, other))
        for target, source in zip(ours, theirs, strict=True):
            target.copy_(source)

    def to(self, device: torch.device | str) -> Projector:
        """Return this projector on `device`. If it is there already, it is returned itself."""
        indices, values = self.indices.to(device), self.values.to(device)
        return self if indices is self.indices and values is self.values else Projector(indices, values, self.d)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dense matrix, [rows, d]."""
        matrix = torch.zeros(self.rows, self.d, dtype=dtype, device=self.device)
        return matrix.scatter_(1, self.indices.long(), self.values.to(dtype))


def beside(projectors: Sequence[Projector]) -> Projector:
    """Interleave the projectors of k matrices of one shape, d and r into one projector. Row i of matrix j is row
    i * k + j, and its column c is column j * d + c. A product with k matrices that are interleaved too has the product
    of each matrix in its own columns, and adds terms in the same order."""
    first, count = projectors[0], len(projectors)
    before = first.d * torch.arange(count, dtype=torch.int32, device=first.device)[:, None]
    indices = torch.stack([each.indices for each in projectors], dim=1) + before
    values = torch.stack([each.values for each in projectors], dim=1)
    return Projector(indices.view(-1, first.r), values.view(-1, first.r), count * first.d)


def projector_bytes(rows: int, d: int, r: int) -> int:
    """Return the bytes of a projector on its device, with its `columns`."""
    return 12 * rows * r + 4 * (d + 1)


def random_projector(rows: int, d: int, r: int, generator: torch.Generator, device: torch.device | str) -> Projector:
    """Draw a projector with r uniformly chosen columns in each row and values of N(0, 1/r), variance 1/r. A row's
    squares add up to 1 in the mean. This is the start of arXiv 2406.10181.

    generator: a generator on the CPU, so that the numbers are the same for every device. Raises SlideError for another
    device, and for sizes that are not 1 <= r <= d.
    """
    if generator.device.type != "cpu":
        raise SlideError(
            f"random_projector: the generator is on {generator.device}; pass one on the CPU, for numbers that do not "
            "depend on the device."
        )
    _require_sizes(rows, r, d)
    indices = torch.empty(rows, r, dtype=torch.int64)
    # Floyd's choice of r among d: each set has the same probability, and no tensor has size [rows, d].
    for place in range(r):
        last = d - r + place
        drawn = torch.randint(last + 1, (rows,), generator=generator)
        taken = (indices[:, :place] == drawn[:, None]).any(dim=1)
        indices[:, place] = torch.where(taken, last, drawn)
    values = random_values(rows, r, generator)
    return Projector(indices.sort(dim=1).values.int().to(device), values.to(device), d)


def random_values(rows: int, r: int, generator: torch.Generator) -> Tensor:
    """Draw values of a random projector, [rows, r]. They are on the CPU, like the generator."""
    return torch.randn(rows, r, generator=generator) / r**0.5


def _require_sizes(rows: int, r: int, d: int) -> None:
    if rows < 1 or not 1 <= r <= d:
        raise SlideError(f"Projector: {rows} rows, r = {r} and d = {d}; it needs a row, and 1 <= r <= d.")
    if rows * r >= 1 << 31:
        raise SlideError(f"Projector: {rows} rows of {r} non-zeros are more than its 32-bit indices count.")
