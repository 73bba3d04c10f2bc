"""What a pair of projectors loses of a gradient, values that lose less of it, and moments in their subspace
(arXiv 2406.10181)."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_slide.compression.lsp.objective import Objective
from ds_slide.compression.lsp.projection import project, residual_square_sums
from ds_slide.compression.lsp.projector import Projector, random_projector
from ds_slide.errors import SlideError

# At first; it falls linearly to 0. With 0.02, 0.05 and 0.1 the bias was 0.385, 0.349 and 0.339 after 100 steps (256 x
# 192 with singular values 1/k, d = 96, r = 4); 0.2 was worse than 0.1.
LEARNING_RATE = 0.1
# Steps between two looks at the bias on the host, each of which waits for the GPU.
LOOK_EVERY = 10


def bias(gradient: Tensor, left: Projector, right: Projector) -> Tensor:
    """|PPᵀGQQᵀ - G| / |G| in Frobenius norms, [] fp64 on the gradient's device, without waiting and without a matrix of
    its size. 0 for a gradient of zeros; not finite for one that is not.

    gradient: G [m, n], bf16, fp16 or fp32, contiguous. left: P [m, d1]. right: Q [n, d2]. Raises SlideError for other
    shapes, dtypes, devices or strides. The test of arXiv 2406.10181 is whether this exceeds a threshold.
    """
    return _bias(*residual_square_sums(gradient, left, right))


@torch.no_grad()
def refit(
    gradient: Tensor,
    left: Projector,
    right: Projector,
    *,
    threshold: float,
    steps: int,
    beta: float,
    generator: torch.Generator,
) -> tuple[Projector, Projector, Tensor]:
    """Values of P and Q, in the columns that they have, for which `bias` + beta * (|P| + |Q|) is less on `gradient`.

    The objective of arXiv 2406.10181 with the bias relative to |G|, so that beta means the same for every gradient.

    -> (left, right, their bias, [] fp64). They are those that were given where their bias is not above `threshold`,
    else the best after `steps` steps of Adam, or fewer: every `LOOK_EVERY` steps it is seen whether the bias has come
    down to `threshold`. The fit begins with the values that it is given, scaled to where their bias is least, or with
    those that `generator` (on the CPU) draws where no gradient comes back through them. It waits for the GPU. The
    same arguments give the same values on the same kind of device. A gradient that is not finite changes nothing.

    Shapes, dtypes and errors are those of `bias`.
    """
    lost, whole = residual_square_sums(gradient, left, right)
    before = _bias(lost, whole)
    drawn = [random_projector(one.rows, one.d, one.r, generator, one.device).values for one in (left, right)]
    if not torch.isfinite(whole) or float(before) <= threshold:
        return left, right, before
    objective = Objective(gradient, whole, left, right, beta)
    values = objective.start([left.values, right.values], drawn)
    best = [each.clone() for each in values]
    least = its_bias = torch.full((), torch.inf, dtype=torch.float64, device=gradient.device)
    optimizer = torch.optim.Adam(values, lr=LEARNING_RATE)
    for step in range(steps + 1):
        now, bias_now, slopes = objective.at(values)
        better = now < least
        least, its_bias = torch.where(better, now, least), torch.where(better, bias_now, its_bias)
        best = [torch.where(better, new, old) for new, old in zip(values, best, strict=True)]
        if step == steps or (step % LOOK_EVERY == 0 and float(its_bias) <= threshold):
            break
        for each, slope in zip(values, slopes, strict=True):
            each.grad = slope
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / steps)
        optimizer.step()
    left, right = left.with_values(best[0]), right.with_values(best[1])
    return left, right, bias(gradient, left, right)


def refit_bytes(gradient: Tensor, left: Projector, right: Projector) -> int:
    """Bytes that `refit` allocates on the GPU at most, beside those of matrix products' own workspace: Gᵀ, GQ, GᵀP, a
    dense product or projector, matrices with sides of d, and some numbers for each non-zero."""
    (m, n), (d1, d2) = gradient.shape, (left.d, right.d)
    dense = 4 * (n * d1 + m * d2 + max(m * d1, n * d2))
    non_zeros = m * left.r * (8 * left.r + 64) + n * right.r * (8 * right.r + 64)
    return gradient.nbytes + dense + 64 * max(d1, d2) ** 2 + non_zeros


@torch.no_grad()
def carry_moments(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    old_left: Projector,
    old_right: Projector,
    new_left: Projector,
    new_right: Projector,
) -> tuple[Tensor, Tensor]:
    """Moments of the compressed gradient in the subspace of new projectors, as in arXiv 2406.10181:

        M <- (PᵀP_old) M (Q_oldᵀQ)        V <- (PᵀP_old)^2 V (Q_oldᵀQ)^2, squares by element

    exp_avg, exp_avg_sq: M and V [d1, d2] fp32, on any device; the results are new ones beside them. The projectors are
    those of `compress` before and after a fit, on one device, where the products are computed: moments that lie
    elsewhere are moved there and back, which waits. The d of a projector may change. Raises SlideError for moments of
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
