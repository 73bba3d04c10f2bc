"""Matrices of a unit that one launch compresses or updates: their places, and their projectors in stacks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_slide.compression.lsp.projector import Columns, Projector
from ds_slide.kernels.lsp.table import WIDTH, Member, Table, table_of
from ds_slide.model.layout import Entry


@dataclass(frozen=True)
class Matrix:
    """A matrix of the unit."""

    entry: Entry
    d: int
    encoded: Entry
    """The place of its d * d elements in the layout of the encoded gradient."""

    @property
    def start(self) -> int:
        """The first of its elements in the encoded gradient of all ranks."""
        return self.encoded.slot_offset

    @property
    def numel(self) -> int:
        return self.d * self.d

    @property
    def product_numel(self) -> int:
        """Elements of the product with one of its projectors."""
        return self.d * self.entry.shape[1]

    @property
    def upper_half(self) -> int:
        """The upper half of its elements' numbers for stochastic rounding (`ds_slide.optim.rounding`). It comes from
        the name, so that the bits do not depend on how the model is cut into units."""
        return zlib.crc32(self.entry.name.encode()) >> 1

    @property
    def member(self) -> Member:
        rows, columns = self.entry.shape
        return Member(rows, columns, self.d, self.start, self.entry.slot_offset, self.upper_half)

    def within(self, encoded: Tensor) -> Tensor:
        """Return its part of an encoded gradient or change of all ranks, [d, d]."""
        return encoded[self.start : self.start + self.numel].view(self.d, self.d)

    def of_weights(self, buffer: Tensor) -> Tensor:
        """Return its part of a buffer in slot layout, in its shape."""
        entry = self.entry
        return buffer[entry.slot_offset : entry.slot_offset + entry.numel].view(entry.shape)


@dataclass(frozen=True, eq=False)
class Stack:
    """Projectors of one r, each a view of its part of flat tensors (see `Projector` and `Columns`)."""

    projectors: Sequence[Projector]
    indices: Tensor
    values: Tensor
    starts: Tensor
    entries: Tensor
    r: int


@dataclass(frozen=True, eq=False)
class Group:
    """At most WIDTH consecutive matrices of a unit."""

    first: int
    """The number of the first matrix."""
    left: Stack
    right: Stack
    table: Table

    @property
    def numbers(self) -> slice:
        return slice(self.first, self.first + self.table.count)


def grouped(matrices: Sequence[Matrix]) -> Iterator[Sequence[Matrix]]:
    """Cut `matrices` into groups, in their order."""
    return (matrices[start : start + WIDTH] for start in range(0, len(matrices), WIDTH))


def group_of(
    first: int, matrices: Sequence[Matrix], pairs: Sequence[Sequence[Projector]], device: torch.device
) -> Group:
    """Make a group on `device` with copies of its matrices' projectors. `pairs`: (P, Q) of each matrix."""
    left, right = (_stacked(side, device) for side in zip(*pairs, strict=True))
    return Group(first, left, right, table_of([matrix.member for matrix in matrices], device))


def _stacked(projectors: Sequence[Projector], device: torch.device) -> Stack:
    assert len({each.r for each in projectors}) == 1
    non_zeros, starts = sum(each.indices.numel() for each in projectors), sum(each.d + 1 for each in projectors)

    def room(numel: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    whole = room(non_zeros), room(non_zeros, torch.float32), room(starts), room(non_zeros)
    views: list[Projector] = []
    entry = column = 0
    for each in projectors:
        shape, entries, columns = each.indices.shape, slice(entry, entry + each.indices.numel()), each.d + 1
        view = Projector(whole[0][entries].view(shape), whole[1][entries].view(shape), each.d)
        view = view.with_columns(Columns(whole[2][column : column + columns], whole[3][entries]))
        view.copy_(each)
        views.append(view)
        entry, column = entries.stop, column + columns
    return Stack(views, *whole, r=projectors[0].r)
