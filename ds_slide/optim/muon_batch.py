"""Orthogonal updates of several parameters together, on a GPU whose kernel computes symmetric products.

The iterations of `ds_slide.optim.muon` multiply polynomials of X X^T, which are symmetric. `symmetric_product_`
computes half of each and takes a batch. One matrix of 2048 x 2048 has 72 tiles for 132 processors, and five have 360.
So all matrices of a unit whose smaller sides are equal are iterated together, bounded by bytes.

A result does not depend on the batch: the kernel computes each tile by itself. cuBLAS gets the products that are not
symmetric one parameter at a time, because it may sum in another order for more matrices.

Matrices lie as [longer side, smaller side], which is how a tall weight lies. Others are turned while they are divided
by their norms.

All tensors of the iterations lie in memory of the caller, which they fill (`Batch`): nothing is allocated, so they can
be recorded as a CUDA graph.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import torch

from ds_slide.kernels.offload.tiles import CAPABILITIES, has_tiles, tiles_of
from ds_slide.optim.muon import ITERATION, RESTART, STEPS, Method
from ds_slide.optim.muon_groups import SHORT_DTYPES, Shape, numel_of, squares_of

_A, _B, _C = ITERATION


def goes_together(shape: Shape, dtype: torch.dtype) -> bool:
    """Whether `orthogonal_together` takes these matrices, in products of `dtype`. It does not depend on where their
    states are."""
    return dtype in SHORT_DTYPES and has_tiles(min(shape[1:]), max(shape[1:]))


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether `symmetric_product_` has tiles for the device. They are read by descriptors, which Triton 3.3 lacks."""
    if device.type != "cuda" or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device)[0] not in CAPABILITIES:
        return False
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


def may_have_kernel() -> bool:
    """Whether a run that is planned here may have the kernel. A machine without a GPU plans for another one."""
    return not torch.cuda.is_available() or has_kernel(torch.device("cuda", torch.cuda.current_device()))


def orthogonal_together(
    shapes: Sequence[Shape], updates: Iterator[torch.Tensor], method: Method, dtype: torch.dtype, device: torch.device
) -> Iterator[torch.Tensor]:
    """Yield what `muon.orthogonal` returns for each parameter, flat. `updates`: flat, fp32, on `device`, taken one by
    one. The smaller sides of all matrices are equal.

    "gram" iterates on the square of square matrices, too: with half of each symmetric product it costs as much as
    "standard", and they join the others."""
    batch = Batch(shapes, method, torch.empty(numel_of(shapes), dtype=dtype, device=device))
    batch.fill(updates)
    yield from batch.iterate()


@dataclass(frozen=True)
class Side:
    """Matrices with the same longer side, one parameter after the other. `matrices`: [b, longer, smaller]. `first`: the
    place of the first in the batch."""

    matrices: torch.Tensor
    shapes: Sequence[Shape]
    first: int

    @property
    def squares(self) -> slice:
        return slice(self.first, self.first + self.matrices.shape[0])

    def parameters(self) -> Iterator[tuple[slice, slice, Shape]]:
        """Yield the place of each parameter in `matrices` and in the batch, and its shape."""
        start = 0
        for shape in self.shapes:
            stop = start + shape[0]
            yield slice(start, stop), slice(self.first + start, self.first + stop), shape
            start = stop


@dataclass(frozen=True)
class _Place:
    """A place of all matrices, and three squares of each that may be used while they are there. They lie in the other
    place, which is empty then."""

    sides: Sequence[Side]
    squares: Sequence[torch.Tensor]


class Batch:
    """Matrices of several parameters whose smaller sides are equal, in memory that is given.

    The memory has two places of all matrices, between which a product moves them; elements between the places, if
    three squares of each matrix are larger than a place; and one square of each matrix, the next factor of all."""

    def __init__(self, shapes: Sequence[Shape], method: Method, memory: torch.Tensor) -> None:
        """`memory`: at least `numel_of` elements of the data type of the products, flat."""
        self._method = method
        numel, squares = sum(map(math.prod, shapes)), squares_of(shapes)
        end = numel_of(shapes) - squares
        second = end - numel
        short = min(shapes[0][1:])
        self._factor = memory[end : end + squares].view(-1, short, short)
        self._places = (
            _place(shapes, memory[:numel], memory[numel:end], self._factor),
            _place(shapes, memory[second:end], memory[:second], self._factor),
        )

    def fill(self, updates: Iterator[torch.Tensor]) -> None:
        """Write the updates, divided by their norms."""
        for side in self._places[0].sides:
            for place, _, shape in side.parameters():
                _divide(next(updates).view(shape), side.matrices[place], self._method)

    def iterate(self) -> list[torch.Tensor]:
        """Replace the matrices, and return the orthogonal updates, each flat and at the same place each time."""
        here, there = self._places
        beta = 0.0 if self._method == "gram" else _A
        if self._method == "gram":
            self._make_product(here, RESTART)
            self._multiply(here, there, beta)
            here, there = there, here
            self._make_product(here, STEPS - RESTART)
        else:
            self._make_polynomial(here)
            for _ in range(STEPS - 1):
                self._multiply(here, there, beta)
                here, there = there, here
                self._make_polynomial(here)
        return list(self._results(here, there, beta))

    def _make_product(self, place: _Place, steps: int) -> None:
        """Set the factor to the product of the polynomials of some iterations."""
        gram, z, third = place.squares
        product, other = (self._factor, third) if steps % 2 else (third, self._factor)
        _grams(gram, place.sides)
        _symmetric(z, gram, gram, alpha=_C, beta=_B, shifted=product)
        for _ in range(steps - 1):
            _symmetric(other, z, gram, beta=_A)
            _symmetric(gram, z, other, beta=_A)
            _symmetric(z, gram, gram, alpha=_C, beta=_B)
            _symmetric(other, z, product, beta=_A)
            product, other = other, product
        assert product is self._factor

    def _make_polynomial(self, place: _Place) -> None:
        """Set the factor to the polynomial of the next iteration without ``_A`` on its diagonal."""
        square = place.squares[0]
        _grams(square, place.sides)
        _symmetric(self._factor, square, square, alpha=_C, beta=_B)

    def _multiply(self, here: _Place, there: _Place, beta: float) -> None:
        """Set all matrices there to ``factor @ X + beta * X`` of those here."""
        for side, target in zip(here.sides, there.sides, strict=True):
            for place, squares, _ in side.parameters():
                x = side.matrices[place]
                _add_product(target.matrices[place], x, x, self._factor[squares], beta)

    def _results(self, here: _Place, there: _Place, beta: float) -> Iterator[torch.Tensor]:
        """Do the last product, and turn matrices back as their weights lie."""
        for side, target in zip(here.sides, there.sides, strict=True):
            for place, squares, shape in side.parameters():
                x, own, flat = side.matrices[place], self._factor[squares], target.matrices[place].view(-1)
                if shape[1] >= shape[2]:
                    _add_product(flat.view(shape), x, x, own, beta)
                else:
                    _add_product(flat.view(shape), x.mT, own, x.mT, beta)
                yield flat


def _place(shapes: Sequence[Shape], matrices: torch.Tensor, free: torch.Tensor, like: torch.Tensor) -> _Place:
    """Return the place with these elements for all matrices. `free`: elements for squares `like` those of a factor."""
    sides, start, first = [], 0, 0
    for long, group in groupby(shapes, key=lambda shape: max(shape[1:])):
        own = list(group)
        stop = start + sum(map(math.prod, own))
        sides.append(Side(matrices[start:stop].view(-1, long, like.shape[-1]), own, first))
        start, first = stop, sides[-1].squares.stop
    squares = [free[each * like.numel() :][: like.numel()].view(like.shape) for each in range(3)]
    return _Place(sides, squares)


def _add_product(result: torch.Tensor, x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: float) -> None:
    """Set `result` to ``left @ right + beta * x``."""
    if beta:
        torch.baddbmm(x, left, right, beta=beta, out=result)
    else:
        torch.bmm(left, right, out=result)


def _divide(update: torch.Tensor, target: torch.Tensor, method: Method) -> None:
    """Write matrices [count, rows, columns] divided by their norms, with the longer side first. The norm is in the data
    type of the products for "standard", as in `muon.orthogonal`."""
    if method == "standard":
        update = update.to(target.dtype)
    norm = update.norm(dim=(-2, -1), keepdim=True) + 1e-7
    if update.size(-2) >= update.size(-1):
        torch.div(update, norm, out=target)
        return
    from ds_slide.kernels.offload.symmetric_product import divided_and_turned_  # importing Triton takes a second

    divided_and_turned_(target, update, norm)


def _symmetric(
    result: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    alpha: float = 1.0,
    beta: float,
    shifted: torch.Tensor | None = None,
) -> None:
    """Set `result` to ``alpha * left @ right + beta * right`` of squares. `shifted`: gets the same plus ``_A`` on the
    diagonal."""
    from ds_slide.kernels.offload.symmetric_product import symmetric_product_

    tiles = tiles_of(right.shape[-1])
    symmetric_product_(result, left, right, tiles, alpha=alpha, beta=beta, added=right, shift=_A, shifted=shifted)


def _grams(result: torch.Tensor, sides: Sequence[Side]) -> None:
    """Set `result` to the squares of all matrices, [b, smaller, smaller]."""
    from ds_slide.kernels.offload.symmetric_product import symmetric_product_

    for side in sides:
        turned = side.matrices.mT
        symmetric_product_(result[side.squares], turned, turned, tiles_of(result.shape[-1]))
