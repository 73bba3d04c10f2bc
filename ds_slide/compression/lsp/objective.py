"""The objective that projectors are fitted by, and its slope by their values (arXiv 2406.10181).

With S = PᵀGQ, A = PᵀP, B = QᵀQ and X = PSQᵀ, what comes back of the gradient:

    |X - G|^2 = tr(A S B Sᵀ) - 2 |S|^2 + |G|^2
    slope of its half by P = P (S B Sᵀ) + (GQ) (B Sᵀ A - 2 Sᵀ), by Q = Q (Sᵀ A S) + (GᵀP) (A S B - 2 S)

So a step takes sparse products with G and dense ones with sides of d; nothing of G's size is made but Gᵀ, once. Slopes
are needed at the non-zeros alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_slide.compression.lsp.projection import project, sampled
from ds_slide.compression.lsp.projector import Projector


class _Products(NamedTuple):
    """Of one pair of projectors, with G divided by its norm."""

    compressed: Tensor
    """S [d1, d2]."""
    left_gram: Tensor
    right_gram: Tensor
    """A [d1, d1] and B [d2, d2]."""
    by_left: Tensor
    """GᵀP, [n, d1]."""
    by_right: Tensor
    """GQ, [m, d2]."""

    def returned_square(self) -> Tensor:
        """|X|^2, [] fp64."""
        rows, columns = self.left_gram @ self.compressed, self.compressed @ self.right_gram
        return (rows.double() * columns.double()).sum()


class Objective:
    """|X - G| / |G| + beta * (|P| + |Q|) as a function of the values of P and Q, for a finite G that is not zero.

    square_sum: |G|^2, [] fp64.
    """

    def __init__(self, gradient: Tensor, square_sum: Tensor, left: Projector, right: Projector, beta: float) -> None:
        self._gradient, self._transposed = gradient, gradient.T.contiguous()
        self._patterns, self._beta = (left, right), beta
        self._inverse_norm = square_sum.rsqrt().float()

    def start(self, values: Sequence[Tensor], drawn: Sequence[Tensor]) -> list[Tensor]:
        """`values`, or `drawn` where no gradient comes back through those, scaled to where the bias is least."""
        usable = self._scale(values).isfinite()
        chosen = [torch.where(usable, old, new) for old, new in zip(values, drawn, strict=True)]
        return [each * self._scale(chosen) for each in chosen]

    def at(self, values: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """-> the objective and the bias, [] fp64, and the objective's slope by each of `values`."""
        products = self._products(values)
        s, a, b, by_left, by_right = products
        bias = (products.returned_square() - 2 * s.double().square().sum() + 1).clamp(min=0).sqrt()
        norms = [each.norm() for each in values]
        sb, as_ = s @ b, a @ s
        slopes = [
            sampled(self._patterns[0].with_values(values[0]), sb @ s.T, by_right, sb.T @ a - 2 * s.T),
            sampled(self._patterns[1].with_values(values[1]), s.T @ as_, by_left, as_ @ b - 2 * s),
        ]
        # A bias of zero has no slope; the floor keeps it finite.
        inverse = bias.clamp(min=1e-12).reciprocal().float()
        slopes = [
            slope * inverse + self._beta * each / norm for slope, each, norm in zip(slopes, values, norms, strict=True)
        ]
        return bias + self._beta * (norms[0] + norms[1]), bias, slopes

    def _scale(self, values: Sequence[Tensor]) -> Tensor:
        """What to multiply both by, c, [] fp32: X becomes c^4 X, which is nearest to G where c^4 = |S|^2 / |X|^2."""
        products = self._products(values)
        return (products.compressed.double().square().sum() / products.returned_square()).pow(0.25).float()

    def _products(self, values: Sequence[Tensor]) -> _Products:
        left, right = (one.with_values(each) for one, each in zip(self._patterns, values, strict=True))
        by_left = project(self._gradient, left).mul_(self._inverse_norm)
        by_right = project(self._transposed, right).mul_(self._inverse_norm)
        grams = [project(one.dense(), one) for one in (left, right)]
        return _Products(project(by_left, right), grams[0], grams[1], by_left, by_right)
