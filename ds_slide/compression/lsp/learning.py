"""The loss of a gradient by a pair of projectors, values that lose less, and moments in their subspace
(arXiv 2406.10181)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from ds_slide.compression.lsp.objective import Objective
from ds_slide.compression.lsp.projection import project, residual_square_sums
from ds_slide.compression.lsp.projector import Projector, random_values
from ds_slide.errors import SlideError

# The rate of the first step; it falls linearly to 0. With 0.02, 0.05 and 0.1 the bias was 0.385, 0.349 and 0.339 after
# 100 steps (256 x 192 with singular values 1/k, d = 96, r = 4). 0.2 was worse than 0.1.
LEARNING_RATE = 0.1
# Steps between two reads of the bias on the host. Each read waits for the GPU.
LOOK_EVERY = 10
# The most bytes of a batch of fits, unless one fit alone needs more: three 1536 x 576 with d = 288 are 45 MB. A batch
# saves the host's time for launches. Above this size the GPU's own time is longer.
BATCH_BYTES = 64 << 20


def bias(gradient: Tensor, left: Projector, right: Projector) -> Tensor:
    """Return |PPᵀGQQᵀ - G| / |G| in Frobenius norms, [] fp64 on G's device, without waiting and without a matrix of G's
    size. It is 0 for a gradient of zeros, and not finite for a gradient that is not finite.

    gradient: G [m, n], bf16, fp16 or fp32, contiguous. left: P [m, d1]. right: Q [n, d2]. Raises SlideError for other
    shapes, dtypes, devices or strides. arXiv 2406.10181 tests whether the bias exceeds a threshold.
    """
    return _bias(*residual_square_sums(gradient, left, right))


@dataclass(frozen=True)
class Fit:
    """A gradient and the projectors to be fitted to it, like in `bias`."""

    gradient: Tensor
    left: Projector
    right: Projector
    generator: torch.Generator
    """A generator on the CPU. It draws the same numbers for any result of the fit."""

    def of_tall(self) -> Fit:
        """Return this fit if the matrix is not wide, else the transposed fit."""
        rows, columns = self.gradient.shape
        return self if rows >= columns else Fit(self.gradient.T, self.right, self.left, self.generator)


Fitted = tuple[Projector, Projector, Tensor]
"""Left and right projectors, and their bias, [] fp64."""


@torch.no_grad()
def refit(fits: Sequence[Fit], *, threshold: float, steps: int, beta: float) -> list[Fitted]:
    """Lower `bias` + beta * (|P| + |Q|) on the gradient of each fit by new values of P and Q in the same columns.

    This is the objective of arXiv 2406.10181. The bias is relative to |G|, so that beta means the same for every
    gradient.

    Returns projectors and their bias. Given projectors with a bias of at most `threshold` are returned unchanged. The
    others are the best of at most `steps` steps of Adam. The host reads the bias every `LOOK_EVERY` steps, and stops
    when all matrices that are fitted together (`_batches`) have reached `threshold`. A fit begins with the given
    values, scaled to where their bias is least. If no gradient comes back through them, it begins with values from its
    generator. The function waits for the GPU. The same arguments give the same values on the same kind of device. A
    gradient that is not finite changes nothing.
    """
    if not fits:
        return []
    sums = [residual_square_sums(each.gradient, each.left, each.right) for each in fits]
    found: list[Fitted] = [(each.left, each.right, _bias(*its)) for each, its in zip(fits, sums, strict=True)]
    drawn = [[random_values(one.rows, one.r, each.generator) for one in (each.left, each.right)] for each in fits]
    seen = torch.stack([torch.stack((its[1], before)) for its, (*_, before) in zip(sums, found, strict=True)]).tolist()
    chosen = [number for number, (whole, before) in enumerate(seen) if isfinite(whole) and not before <= threshold]
    for numbers in _batches(fits, chosen):
        batch = [fits[number] for number in numbers]
        whole = torch.stack([sums[number][1] for number in numbers])
        pairs = _fitted(batch, whole, [drawn[number] for number in numbers], threshold, steps, beta)
        for number, each, (left, right) in zip(numbers, batch, pairs, strict=True):
            found[number] = left, right, bias(each.gradient, left, right)
    return found


def _batches(fits: Sequence[Fit], chosen: Sequence[int]) -> Iterator[list[int]]:
    """Cut the `chosen` fits into batches of matrices of one shape, up to a transposition. The memory limit of a batch
    is `BATCH_BYTES`, or the memory of the largest chosen fit if that is more."""
    alike: dict[Hashable, list[int]] = {}
    for number in chosen:
        tall = fits[number].of_tall()
        sides = ((one.d, one.r) for one in (tall.left, tall.right))
        alike.setdefault((tall.gradient.shape, tall.gradient.dtype, *sides), []).append(number)
    room = max([BATCH_BYTES, *(refit_bytes(fits[number : number + 1]) for number in chosen)])
    for numbers in alike.values():
        count = max(1, 2 * room // refit_bytes([fits[numbers[0]]] * 2))
        yield from (numbers[start : start + count] for start in range(0, len(numbers), count))


def _fitted(
    fits: Sequence[Fit],
    square_sums: Tensor,
    drawn: Sequence[Sequence[Tensor]],
    threshold: float,
    steps: int,
    beta: float,
) -> list[tuple[Projector, Projector]]:
    """Do the fits of one batch. `drawn`: for each fit values for left and right."""
    flips = [each.of_tall() is not each for each in fits]
    tall = [each.of_tall() for each in fits]
    objective = Objective(
        [each.gradient for each in tall],
        square_sums,
        [each.left for each in tall],
        [each.right for each in tall],
        beta,
    )
    sides = zip(*(its[::-1] if flip else its for its, flip in zip(drawn, flips, strict=True)), strict=True)
    values, device = objective.values, square_sums.device
    objective.start([torch.stack(side, dim=1).to(device) for side in sides])
    best = [each.clone() for each in values]
    least = its_bias = torch.full_like(square_sums, torch.inf)
    averages, squares = [torch.zeros_like(each) for each in values], [torch.zeros_like(each) for each in values]
    done = torch.zeros((), device=device)
    for step in range(steps + 1):
        now, bias_now, slopes = objective.at()
        better = now < least
        least, its_bias = torch.where(better, now, least), torch.where(better, bias_now, its_bias)
        for kept, new in zip(best, values, strict=True):
            torch.where(better[:, None], new, kept, out=kept)
        if step == steps or (step % LOOK_EVERY == 0 and bool((its_bias <= threshold).all())):
            break
        done += 1
        torch._fused_adam_(
            values,
            slopes,
            averages,
            squares,
            [],
            [done, done],
            lr=LEARNING_RATE * (1 - step / steps),
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
    pairs = []
    for number, (each, flip) in enumerate(zip(fits, flips, strict=True)):
        left, right = (side[:, number].contiguous() for side in (best[::-1] if flip else best))
        pairs.append((each.left.with_values(left), each.right.with_values(right)))
    return pairs


def refit_bytes(fits: Sequence[Fit]) -> int:
    """Return the most bytes that the fits of one batch allocate on the GPU, without the workspace of matrix products.
    Each fit has Gᵀ, and G if it is not alone, GQ, GᵀP, dense projectors and a product of them. It also has matrices
    with sides of d, and some numbers for each non-zero."""
    return sum(_refit_bytes(each, len(fits)) for each in fits)


def _refit_bytes(fit: Fit, together: int) -> int:
    gradient, left, right = fit.gradient, fit.left, fit.right
    (m, n), (d1, d2) = gradient.shape, (left.d, right.d)
    dense = 4 * (n * d1 + m * d2 + m * d1 + n * d2)
    non_zeros = m * left.r * (8 * left.r + 64) + n * right.r * (8 * right.r + 64)
    return gradient.nbytes * min(together, 2) + dense + 64 * max(d1, d2) ** 2 + non_zeros


@torch.no_grad()
def carry_moments(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    old_left: Projector,
    old_right: Projector,
    new_left: Projector,
    new_right: Projector,
) -> tuple[Tensor, Tensor]:
    """Carry moments of the compressed gradient into the subspace of new projectors, like in arXiv 2406.10181:

        M <- (PᵀP_old) M (Q_oldᵀQ)        V <- (PᵀP_old)^2 V (Q_oldᵀQ)^2, squares by element

    exp_avg, exp_avg_sq: M and V [d1, d2] fp32, on any device. The results are new tensors on the same device. The old
    and new projectors are from before and after a fit, on one device that computes the products. Moments on another
    device are moved there and back, which waits. The d of a projector may change. Raises SlideError for moments of
    another shape or dtype, and projectors of another number of rows.
    """
    for name, moment in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if tuple(moment.shape) != (old_left.d, old_right.d) or moment.dtype != torch.float32:
            raise SlideError(
                f"carry_moments: {name} must be float32 of shape {[old_left.d, old_right.d]}, but it is {moment.dtype} "
                f"of shape {list(moment.shape)}."
            )
    if (old_left.rows, old_right.rows) != (new_left.rows, new_right.rows):
        raise SlideError(
            f"carry_moments: the new projectors have {new_left.rows} and {new_right.rows} rows, but the old ones "
            f"{old_left.rows} and {old_right.rows}; pass those of one weight."
        )
    rows = project(old_left.dense(), new_left).T  # PᵀP_old
    columns = project(old_right.dense(), new_right)  # Q_oldᵀQ

    def carried(moment: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (a @ moment.to(a.device) @ b).to(moment.device)

    return carried(exp_avg, rows, columns), carried(exp_avg_sq, rows.square(), columns.square())


def _bias(lost: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole == 0, 0.0, (lost / whole).sqrt())
