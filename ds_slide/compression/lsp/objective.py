"""The objective of a fit of projectors, and its slope by their values (arXiv 2406.10181).

Let S = PᵀGQ, A = PᵀP, B = QᵀQ, F = ASB - 2S, and X = PSQᵀ, the decompressed gradient. Then:

    |X - G|^2 = tr(A S B Sᵀ) - 2 |S|^2 + |G|^2 = <S, F> + |G|^2
    slope of its half by P = P (S B Sᵀ) + (GQ) Fᵀ, by Q = Q (Sᵀ A S) + (GᵀP) F

So a step takes sparse products with G and dense products with sides of d. The only tensor of G's size is Gᵀ, made once.
Slopes are needed at the non-zeros only.

Matrices of one shape are fitted together, with the launches of a single one: a step of a small matrix takes only the
host's time for launches. Their rows are interleaved, [rows, k, columns], and so are their projectors' (`beside`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_slide.compression.lsp.projection import project, sampled
from ds_slide.compression.lsp.projector import Projector, beside


class _Products(NamedTuple):
    """The products of k pairs of projectors, with each G divided by its norm."""

    compressed: Tensor
    """S [k, d1, d2]."""
    left: Tensor
    """S B, [k, d1, d2]."""
    right: Tensor
    """A S, [k, d1, d2]."""
    factor: Tensor
    """F [k, d1, d2]."""
    by_left: Tensor
    """GᵀP, [n * k, d1]."""
    by_right: Tensor
    """GQ, [m * k, d2]."""

    def lost_square(self) -> Tensor:
        """Return |X - G|^2 - |G|^2, [k] fp64."""
        return (self.compressed * self.factor).sum(dim=(1, 2), dtype=torch.float64)


class _Side:
    """The left projectors, or the right ones."""

    def __init__(self, projectors: Sequence[Projector]) -> None:
        self.count, self.d = len(projectors), projectors[0].d
        self.pattern = beside(projectors)
        """It keeps its `columns` while its values are written in place."""
        self.values = self.by_matrix(self.pattern.values)
        """[rows, k, r], a view."""
        self._columns = torch.stack([each.indices for each in projectors], dim=1).view_as(self.pattern.indices).long()
        self._dense = torch.zeros(self.pattern.rows, self.d, device=self.pattern.device)

    def by_matrix(self, of_rows: Tensor) -> Tensor:
        """View [rows * k, columns] as [rows, k, columns]."""
        return of_rows.view(-1, self.count, of_rows.shape[1])

    def project(self, matrix: Tensor) -> Tensor:
        """Return XᵀP of each matrix, [columns * k, d], for X [rows * k, columns]."""
        return project(matrix, self.pattern).view(-1, self.d)

    def gram(self) -> Tensor:
        """Return PᵀP of each projector, [k, d, d]."""
        return self.by_matrix(self.project(self._dense.scatter_(1, self._columns, self.pattern.values))).transpose(0, 1)


class Objective:
    """|X - G| / |G| + beta * (|P| + |Q|) as a function of the values of P and Q. There are k gradients G of one shape
    and data type, finite and not zero. The projectors of a side have one d and r.

    square_sums: |G|^2, [k] fp64.
    """

    def __init__(
        self,
        gradients: Sequence[Tensor],
        square_sums: Tensor,
        left: Sequence[Projector],
        right: Sequence[Projector],
        beta: float,
    ) -> None:
        self._gradient = _in_turn(gradients)
        self._transposed = _in_turn([each.T for each in gradients])
        self._left, self._right, self._beta = _Side(left), _Side(right), beta
        self.values = [self._left.values, self._right.values]
        """The values of P [m, k, r] and Q [n, k, r], to be written in place. `at` reads them."""
        self._inverse_norms = square_sums.rsqrt().float()[:, None]

    def start(self, drawn: Sequence[Tensor]) -> None:
        """Scale `values` to where the bias is least. Where no gradient comes back through them, `drawn` (of the same
        shapes) replaces them first."""
        usable = self._scale().isfinite()
        for values, others in zip(self.values, drawn, strict=True):
            values.copy_(torch.where(usable, values, others))
        scale = self._scale()
        for values in self.values:
            values.mul_(scale)

    def at(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the objective and the bias, [k] fp64, and the objective's slope by each of `values`."""
        products = self._products()
        s, sb, as_, factor, by_left, by_right = products
        # A bias of zero has no slope; the floor keeps it finite.
        bias = products.lost_square().add_(1).clamp_(min=1e-24).sqrt_()
        norms = [torch.linalg.vector_norm(each, dim=(0, 2)) for each in self.values]
        slopes, transposed = [], s.mT
        for side, own, matrix, f, norm in (
            (self._left, torch.bmm(sb, transposed), by_right, factor, norms[0]),
            (self._right, torch.bmm(transposed, as_), by_left, factor.mT.contiguous(), norms[1]),
        ):
            slope = side.by_matrix(sampled(side.pattern, own.view(-1, side.d), matrix, f.view(-1, matrix.shape[1])))
            slopes.append(slope.div_(bias[:, None]).addcdiv_(side.values, norm[:, None], value=self._beta))
        return torch.add(bias, norms[0] + norms[1], alpha=self._beta), bias, slopes

    def _scale(self) -> Tensor:
        """Return the factor c of both values, [k, 1] fp32. X becomes c^4 X, nearest to G where c^4 = |S|^2 / |X|^2."""
        products = self._products()
        square = products.compressed.double().square().sum(dim=(1, 2))
        return (square / (products.lost_square() + 2 * square)).pow(0.25).float()[:, None]

    def _products(self) -> _Products:
        left, right = self._left, self._right
        by_left, by_right = left.project(self._gradient), right.project(self._transposed)
        left.by_matrix(by_left).mul_(self._inverse_norms)
        right.by_matrix(by_right).mul_(self._inverse_norms)
        s = right.by_matrix(right.project(by_left)).transpose(0, 1)
        a, b = left.gram(), right.gram()
        sb = torch.bmm(s, b)
        return _Products(s, sb, torch.bmm(a, s), torch.baddbmm(s, a, sb, beta=-2), by_left, by_right)


def _in_turn(matrices: Sequence[Tensor]) -> Tensor:
    """Interleave the rows of k matrices, [rows * k, columns], contiguous."""
    return matrices[0].contiguous() if len(matrices) == 1 else torch.stack(list(matrices), dim=1).flatten(0, 1)
