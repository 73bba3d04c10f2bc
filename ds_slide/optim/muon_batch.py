"""Orthogonal updates of several parameters together, on a GPU whose kernel computes symmetric products.

The iterations of `ds_slide.optim.muon` multiply polynomials of X X^T, which are symmetric. `symmetric_product_`
computes half of each and takes a batch. One matrix of 2048 x 2048 has 72 tiles for 132 processors, and five have 360.
So all matrices of a unit whose smaller sides are equal are iterated together, bounded by bytes.

A result does not depend on the batch: the kernel computes each tile by itself. cuBLAS gets the products that are not
symmetric one parameter at a time, because it may sum in another order for more matrices.

Matrices lie as [longer side, smaller side], which is how a tall weight lies. Others are turned while they are divided
by their norms.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import torch

from ds_slide.kernels.offload.tiles import CAPABILITIES, has_tiles, tiles_of
from ds_slide.optim.muon import ITERATION, RESTART, STEPS, Method
from ds_slide.optim.muon_groups import SHORT_DTYPES, Shape

_A, _B, _C = ITERATION


def goes_together(shape: Shape, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these matrices are updated by `orthogonal_together`, in products of `dtype`. It does not depend on where
    their states are."""
    return dtype in SHORT_DTYPES and has_tiles(min(shape[1:]), max(shape[1:])) and has_kernel(device)


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether `symmetric_product_` has tiles for the device."""
    if device.type != "cuda" or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in CAPABILITIES


def orthogonal_together(
    shapes: Sequence[Shape], updates: Iterator[torch.Tensor], method: Method, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Yield what `muon.orthogonal` returns for each parameter, flat. `updates`: flat, fp32, taken one by one. The
    smaller sides of all matrices are equal.

    "gram" iterates on the square of square matrices, too: with half of each symmetric product it costs as much as
    "standard", and they join the others."""
    yield from iterated_together(divided(shapes, updates, method, dtype), method)


def iterated_together(sides: list[Side], method: Method) -> Iterator[torch.Tensor]:
    """Yield the products of the iterations of each parameter, flat. Matrices of `sides` are replaced."""
    if method == "gram":
        product, beta = _by_gram(sides), 0.0
    else:
        product, beta = _by_products(sides), _A
    for side in sides:
        for place, squares, tall in side.parameters():
            x, own = side.matrices[place], product[squares]
            if not tall:
                x = x.mT
            factors = (x, own) if tall else (own, x)
            yield (torch.baddbmm(x, *factors, beta=beta) if beta else torch.bmm(*factors)).reshape(-1)


@dataclass
class Side:
    """Matrices with the same longer side, one parameter after the other. `matrices`: [b, longer, smaller]. `first`: the
    place of the first in the batch."""

    matrices: torch.Tensor
    shapes: Sequence[Shape]
    first: int

    @property
    def squares(self) -> slice:
        return slice(self.first, self.first + self.matrices.shape[0])

    def parameters(self) -> Iterator[tuple[slice, slice, bool]]:
        """Yield the place of each parameter in `matrices` and in the batch, and whether it lies as its weight."""
        start = 0
        for count, rows, columns in self.shapes:
            stop = start + count
            yield slice(start, stop), slice(self.first + start, self.first + stop), rows >= columns
            start = stop


def divided(shapes: Sequence[Shape], updates: Iterator[torch.Tensor], method: Method, dtype: torch.dtype) -> list[Side]:
    """Return the updates divided by their norms."""
    sides, first = [], 0
    for long, group in groupby(shapes, key=lambda shape: max(shape[1:])):
        own = list(group)
        side: Side | None = None
        for index, shape in enumerate(own):
            update = next(updates)
            if side is None:
                size = (sum(each[0] for each in own), long, min(shape[1:]))
                side = Side(torch.empty(size, dtype=dtype, device=update.device), own, first)
                places = [place for place, *_ in side.parameters()]
            _divide(update.view(shape), side.matrices[places[index]], method)
            del update  # before the next one is made
        assert side is not None
        sides.append(side)
        first = side.squares.stop
    return sides


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
    left: torch.Tensor, right: torch.Tensor, *, alpha: float = 1.0, beta: float, shifted: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``alpha * left @ right + beta * right`` of squares. `shifted`: gets the same plus ``_A`` on the
    diagonal."""
    from ds_slide.kernels.offload.symmetric_product import symmetric_product_

    result, tiles = torch.empty_like(right), tiles_of(right.shape[-1])
    symmetric_product_(result, left, right, tiles, alpha=alpha, beta=beta, added=right, shift=_A, shifted=shifted)
    return result


def _grams(sides: Sequence[Side]) -> torch.Tensor:
    """Return the squares of all matrices, [b, smaller, smaller]."""
    from ds_slide.kernels.offload.symmetric_product import symmetric_product_

    some = sides[0].matrices
    size = some.shape[-1]
    result = some.new_empty(sides[-1].squares.stop, size, size)
    for side in sides:
        symmetric_product_(result[side.squares], side.matrices.mT, side.matrices.mT, tiles_of(size))
    return result


def _multiply(sides: Sequence[Side], product: torch.Tensor, beta: float) -> None:
    """Replace all matrices X by ``product @ X + beta * X``."""
    for side in sides:
        made = torch.empty_like(side.matrices)
        for place, squares, _ in side.parameters():
            x = side.matrices[place]
            if beta:
                torch.baddbmm(x, x, product[squares], beta=beta, out=made[place])
            else:
                torch.bmm(x, product[squares], out=made[place])
        side.matrices = made


def _by_gram(sides: Sequence[Side]) -> torch.Tensor:
    """Return the product that the last iterations multiply the matrices by, which the first ones have multiplied."""
    _multiply(sides, _product(sides, RESTART), 0.0)
    return _product(sides, STEPS - RESTART)


def _product(sides: Sequence[Side], steps: int) -> torch.Tensor:
    """Return the product of the polynomials of some iterations."""
    gram = _grams(sides)
    product = torch.empty_like(gram)
    z = _symmetric(gram, gram, alpha=_C, beta=_B, shifted=product)
    for _ in range(steps - 1):
        gram = _symmetric(z, _symmetric(z, gram, beta=_A), beta=_A)
        z = _symmetric(gram, gram, alpha=_C, beta=_B)
        product = _symmetric(z, product, beta=_A)
    return product


def _by_products(sides: Sequence[Side]) -> torch.Tensor:
    """Do all iterations but the last product. Return its factor, which lacks ``_A`` on the diagonal."""
    for _ in range(STEPS - 1):
        _multiply(sides, _polynomial(sides), _A)
    return _polynomial(sides)


def _polynomial(sides: Sequence[Side]) -> torch.Tensor:
    square = _grams(sides)
    return _symmetric(square, square, alpha=_C, beta=_B)
