"""The table of a group's matrices, where each program of a launch over all of them finds its own matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch

from ds_slide.kernels.constants import ALIGNMENT, SEGMENT
from ds_slide.kernels.launch import Compiled

# The most matrices of one launch. A block has 7. Shorter groups are filled up, and compile no other kernel.
WIDTH = 16
# A tile of a product with a projector: a cache line has 64 bf16 elements of a row of G, or 32 fp32 elements of a row of
# the result.
LISTS, ELEMENTS = 32, 64
# A tile of a weight.
ROWS, COLUMNS = 8, 256
# A tile of a change that is transposed.
SIDE = 32
# Partial square sums of a matrix start at multiples of it, so that vector loads can read them.
PARTIALS = 16
# The most for `Table.unit`. The compiler knows the unit and reads rows in vectors.
MOST_UNIT = 16


class Member(NamedTuple):
    """A matrix of a group, [rows, columns]. `start`: where its d * d numbers begin in an encoded gradient or a change.
    `slot_offset`: where its weights begin in slot layout. Both are multiples of ALIGNMENT. `upper_half`: the upper half
    of its elements' numbers (`ds_slide.optim.rounding`), below 2^31."""

    rows: int
    columns: int
    d: int
    start: int
    slot_offset: int
    upper_half: int

    @property
    def partials(self) -> int:
        """Partial square sums of its gradient, and room behind them."""
        return _align(-(-self.rows * self.columns // SEGMENT), PARTIALS)

    @property
    def product(self) -> int:
        """Numbers of the product with its first projector, GᵀP or DQᵀ, and room behind them."""
        return _align(self.d * self.columns, ALIGNMENT)


class Field(NamedTuple):
    """The numbers that a program reads of its matrix. The table has a row for each field."""

    rows: int
    columns: int
    """In units of the table, and so is `d`."""
    d: int
    start: int
    """In units of ALIGNMENT, and so are the next two."""
    slot_offset: int
    product: int
    """Start of the product with its first projector."""
    rows_before: int
    """Rows of the left projectors before its own in their stack."""
    columns_before: int
    """Rows of the right projectors before its own in their stack."""
    starts_before: int
    """Starts of columns before its own, in both stacks."""
    upper_half: int


class Grid(NamedTuple):
    """The programs of one launch."""

    programs: int
    firsts: torch.Tensor
    """[WIDTH] int32: the first program of each matrix, `programs` for a missing matrix."""


@dataclass(frozen=True, eq=False)
class Table:
    """The launches over one group of matrices."""

    count: int
    """The number of matrices."""
    unit: int
    """A common divisor of all columns and d."""
    fields: torch.Tensor
    """[fields of `Field`, WIDTH] int32."""
    squares: Grid
    left: Grid
    right: Grid
    transpose: Grid
    expand: Grid
    apply: Grid
    compiled: Compiled = field(default_factory=dict)
    """Compiled kernels of launches over these matrices."""


def table_of(members: Sequence[Member], device: torch.device) -> Table:
    """Make the table of at most WIDTH matrices, on `device`."""
    assert 0 < len(members) <= WIDTH
    unit = math.gcd(MOST_UNIT, *(side for each in members for side in (each.columns, each.d)))

    def grid(programs: Iterable[int]) -> Grid:
        bounds = list(_starts(programs))
        total = bounds.pop()
        firsts = bounds + [total] * (WIDTH - len(bounds))
        return Grid(total, torch.tensor(firsts, dtype=torch.int32, device=device))

    return Table(
        count=len(members),
        unit=unit,
        fields=torch.tensor(list(_rows(_fields(members, unit))), dtype=torch.int32, device=device),
        squares=grid(each.partials for each in members),
        left=grid(_tiles(each.d, LISTS) * _tiles(each.columns, ELEMENTS) for each in members),
        right=grid(_tiles(each.d, LISTS) * _tiles(each.d, ELEMENTS) for each in members),
        transpose=grid(_tiles(each.d, SIDE) ** 2 for each in members),
        expand=grid(_tiles(each.columns, LISTS) * _tiles(each.d, ELEMENTS) for each in members),
        apply=grid(_tiles(each.rows, ROWS) * _tiles(each.columns, COLUMNS) for each in members),
    )


def _fields(members: Sequence[Member], unit: int) -> Iterator[Field]:
    products, rows, columns, starts = (
        _starts(numbers)
        for numbers in (
            [each.product for each in members],
            [each.rows for each in members],
            [each.columns for each in members],
            [each.d + 1 for each in members],
        )
    )
    for each in members:
        yield Field(
            rows=each.rows,
            columns=each.columns // unit,
            d=each.d // unit,
            start=each.start // ALIGNMENT,
            slot_offset=each.slot_offset // ALIGNMENT,
            product=next(products) // ALIGNMENT,
            rows_before=next(rows),
            columns_before=next(columns),
            starts_before=next(starts),
            upper_half=each.upper_half,
        )


def _rows(fields: Iterable[Field]) -> Iterator[list[int]]:
    for row in zip(*fields, strict=True):
        yield [*row, *(0 for _ in range(WIDTH - len(row)))]


def _starts(numbers: Iterable[int]) -> Iterator[int]:
    """Yield the starts of parts of these sizes that lie one behind the other, and the end of the last part."""
    return accumulate(numbers, initial=0)


def _tiles(length: int, size: int) -> int:
    return -(-length // size)


def _align(numel: int, to: int) -> int:
    return -(-numel // to) * to
