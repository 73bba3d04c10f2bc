"""Inputs of the launches over a group of matrices: projectors in stacks, and a program's own matrix of the table."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from ds_slide.kernels import constants
from ds_slide.kernels.lsp.table import Field, Table

ALIGNMENT = tl.constexpr(constants.ALIGNMENT)
_NUMBERS = {name: tl.constexpr(number) for number, name in enumerate(Field._fields)}
START = _NUMBERS["start"]
UPPER_HALF = _NUMBERS["upper_half"]
SLOT_OFFSET = _NUMBERS["slot_offset"]
PRODUCT = _NUMBERS["product"]
ROWS_BEFORE = _NUMBERS["rows_before"]
COLUMNS_BEFORE = _NUMBERS["columns_before"]
STARTS_BEFORE = _NUMBERS["starts_before"]
_ROWS, _COLUMNS, _D = (_NUMBERS[name] for name in ("rows", "columns", "d"))


class Stack(Protocol):
    """The tensors of `Sparse` for projectors of the same r, one behind the other in flat tensors."""

    @property
    def indices(self) -> torch.Tensor: ...
    @property
    def values(self) -> torch.Tensor: ...
    @property
    def starts(self) -> torch.Tensor: ...
    @property
    def entries(self) -> torch.Tensor: ...
    @property
    def r(self) -> int: ...


class Group(Protocol):
    """Matrices of one table, and the stacks of their projectors."""

    @property
    def table(self) -> Table: ...
    @property
    def left(self) -> Stack: ...
    @property
    def right(self) -> Stack: ...


@triton.jit
def member(firsts, WIDTH: tl.constexpr):
    """Return the number of this program's matrix, and the program's number within that matrix."""
    program = tl.program_id(0)
    index = 0
    for later in tl.static_range(1, WIDTH):
        index = tl.where(program >= tl.load(firsts + later), later, index)
    return index, program - tl.load(firsts + index)


@triton.jit
def field(fields, index, NUMBER: tl.constexpr, WIDTH: tl.constexpr):
    return tl.load(fields + NUMBER * WIDTH + index)


@triton.jit
def sides(fields, index, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows, columns and d of a matrix. The compiler sees the last two as multiples of UNIT."""
    rows = field(fields, index, _ROWS, WIDTH)
    columns = field(fields, index, _COLUMNS, WIDTH) * UNIT
    return rows, columns, field(fields, index, _D, WIDTH) * UNIT


@triton.jit
def place(fields, index, NUMBER: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offset of a field in units of ALIGNMENT. The compiler sees it as a multiple."""
    return field(fields, index, NUMBER, WIDTH).to(tl.int64) * ALIGNMENT


@triton.jit
def entries_before(fields, index, NUMBER: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr):
    """Return the non-zeros of a stack before a matrix. NUMBER: the field of ROWS_BEFORE or COLUMNS_BEFORE."""
    return field(fields, index, NUMBER, WIDTH).to(tl.int64) * R
