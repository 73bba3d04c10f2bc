"""Bias, its slope, refits and carried moments, against dense references in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_slide.compression.lsp import learning
from ds_slide.compression.lsp.learning import Fit, bias, carry_moments, refit
from ds_slide.compression.lsp.objective import Objective
from ds_slide.compression.lsp.projector import Projector, random_projector
from ds_slide.errors import SlideError
from ds_slide.kernels.dtypes import KERNEL_DTYPES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pair(m: int, n: int, d1: int, d2: int, r: int, seed: int = 0) -> tuple[Projector, Projector]:
    source = generator(seed)
    drawn = (random_projector(rows, d, min(r, d), source, DEVICE) for rows, d in ((m, d1), (n, d2)))
    return next(drawn), next(drawn)


def low_rank(m: int, n: int, rank: int, seed: int = 0) -> Tensor:
    """As gradients are: most of it in a few directions, small numbers."""
    source = generator(seed)
    factors = (
        torch.randn(m, rank, generator=source) * torch.logspace(0, -2, rank),
        torch.randn(rank, n, generator=source),
    )
    return (1e-4 * factors[0] @ factors[1]).bfloat16().to(DEVICE)


def dense_bias(gradient: Tensor, left: Tensor, right: Tensor) -> Tensor:
    wide = gradient.double()
    return (left @ left.T @ wide @ right @ right.T - wide).norm() / wide.norm()


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 20), st.integers(1, 20), st.integers(1, 5),
    st.sampled_from(KERNEL_DTYPES),
)  # fmt: skip
def test_bias_is_the_dense_one(m: int, n: int, d1: int, d2: int, r: int, dtype: torch.dtype) -> None:
    left, right = pair(m, n, d1, d2, r)
    gradient = torch.randn(m, n, generator=generator(1)).to(dtype).to(DEVICE)
    expected = dense_bias(gradient, left.dense(torch.float64), right.dense(torch.float64))
    torch.testing.assert_close(bias(gradient, left, right), expected, rtol=1e-5, atol=1e-5)


def test_bias_of_special_gradients() -> None:
    left, right = pair(12, 9, 6, 5, 2)
    gradient = torch.zeros(12, 9, device=DEVICE)
    assert bias(gradient, left, right) == 0
    gradient[2, 3] = torch.nan
    assert not bias(gradient, left, right).isfinite()
    whole = Projector(torch.randperm(9).int()[:, None].to(DEVICE), torch.ones(9, 1, device=DEVICE), 9)
    assert bias(torch.randn(9, 9, device=DEVICE), whole, whole) == 0


@pytest.mark.parametrize("beta", [0.0, 0.03])
def test_the_slope_is_that_of_the_dense_objective(beta: float) -> None:
    left, right = pair(14, 11, 7, 6, 3)
    gradient = low_rank(14, 11, 4)
    square_sums = gradient.double().square().sum()[None]
    (objective,), (found_bias,), slopes = Objective([gradient], square_sums, [left], [right], beta).at()
    dense = [one.dense(torch.float64).requires_grad_() for one in (left, right)]
    expected = dense_bias(gradient, *dense)
    torch.testing.assert_close(found_bias, expected.detach(), rtol=1e-6, atol=0.0)
    expected = expected + beta * (dense[0].norm() + dense[1].norm())
    torch.testing.assert_close(objective, expected.detach(), rtol=1e-6, atol=0.0)
    for one, slope, wide in zip((left, right), slopes, torch.autograd.grad(expected, dense), strict=True):
        at_pattern = wide.gather(1, one.indices.long())
        torch.testing.assert_close(
            slope[:, 0].double(), at_pattern, rtol=1e-4, atol=1e-5 * float(at_pattern.abs().max())
        )


def fitted(gradient: Tensor, left: Projector, right: Projector, steps: int, threshold: float = 0.0, beta: float = 0.0):
    return refit([Fit(gradient, left, right, generator(3))], threshold=threshold, steps=steps, beta=beta)[0]


def test_refits_lower_the_bias() -> None:
    """Of random projectors of half the sides, on a gradient of rank 12: 3.2 at first, where all lost would be 1."""
    gradient = low_rank(96, 64, 12)
    left, right = pair(96, 64, 32, 32, 4)
    biases = [float(bias(gradient, left, right))]
    for steps in (0, 20, 60):
        left, right, found = fitted(gradient, left, right, steps)
        torch.testing.assert_close(found, bias(gradient, left, right))
        biases.append(float(found))
    assert biases[0] > 2 and biases[1] < 1 and biases[2] < 0.5 and biases[3] < 0.3, biases
    assert biases[3] == pytest.approx(
        float(dense_bias(gradient, left.dense(torch.float64), right.dense(torch.float64))), rel=1e-4
    )
    # Another gradient of the same directions gains as well: it is the subspace that was learned.
    source = generator()
    directions = torch.randn(96, 12, generator=source), torch.randn(12, 64, generator=source)
    mixed = directions[0] * torch.logspace(0, -2, 12) @ torch.randn(12, 12, generator=source) / 3 @ directions[1]
    assert bias(mixed.to(DEVICE), left, right) < 0.8


def test_a_fit_never_returns_what_is_worse() -> None:
    gradient = low_rank(24, 20, 3)
    left, right, before = fitted(gradient, *pair(24, 20, 8, 8, 4), steps=80)
    for steps in (1, 2, 3):  # the first steps of Adam are long
        assert fitted(gradient, left, right, steps)[2] <= before * (1 + 1e-5)


def test_a_fit_ends_at_the_threshold() -> None:
    gradient = low_rank(24, 20, 3)
    left, right = pair(24, 20, 8, 8, 4)
    enough = fitted(gradient, left, right, 10_000_000, threshold=0.5)  # years, if it did not end
    assert 0.2 < enough[2] <= 0.5
    again = fitted(gradient, enough[0], enough[1], 10, threshold=0.5)
    assert again[0] is enough[0] and again[1] is enough[1] and again[2] == enough[2]


def test_beta_makes_the_values_smaller() -> None:
    gradient = low_rank(24, 20, 3)
    sizes = []
    for beta in (0.0, 0.05):
        left, right, _ = fitted(gradient, *pair(24, 20, 8, 8, 4), steps=60, beta=beta)
        sizes.append(float(left.values.norm() + right.values.norm()))
    assert sizes[1] < 0.9 * sizes[0]


def test_a_seed_gives_the_same_fit_also_where_nothing_came_back() -> None:
    gradient = low_rank(24, 20, 3)
    left, right = pair(24, 20, 8, 8, 4)
    for values in (left.values, torch.zeros_like(left.values), torch.full_like(left.values, torch.nan)):
        first = fitted(gradient, left.with_values(values), right, 40)
        second = fitted(gradient, left.with_values(values), right, 40)
        assert torch.equal(first[0].values, second[0].values) and torch.equal(first[1].values, second[1].values)
        assert first[2] < 0.6 and first[0].indices is left.indices


def test_what_is_drawn_does_not_depend_on_the_bias() -> None:
    """A generator that serves several weights goes on from the same place whichever of them were fitted."""
    left, right = pair(24, 20, 8, 8, 4)
    states = []
    for threshold in (0.0, 9.0):
        source = generator(3)
        refit([Fit(low_rank(24, 20, 3), left, right, source)], threshold=threshold, steps=2, beta=0.0)
        states.append(source.get_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_a_gradient_that_says_nothing_changes_nothing(bad: float) -> None:
    gradient = low_rank(24, 20, 3) if bad else torch.zeros(24, 20, device=DEVICE)
    gradient[3, 4] = bad
    left, right = pair(24, 20, 8, 8, 4)
    found = fitted(gradient, left, right, 5)
    assert found[0] is left and found[1] is right and (found[2] == 0 or not found[2].isfinite())


def test_carried_moments_are_the_dense_products() -> None:
    old, new = pair(30, 24, 9, 8, 3), pair(30, 24, 7, 10, 3, seed=1)
    moment, square = torch.randn(9, 8, generator=generator()), torch.rand(9, 8, generator=generator())
    found = carry_moments(moment, square, *old, *new)
    rows = new[0].dense(torch.float64).T @ old[0].dense(torch.float64)
    columns = old[1].dense(torch.float64).T @ new[1].dense(torch.float64)
    assert found[0].device == moment.device
    for got, before, a, b in (
        (found[0], moment, rows, columns),
        (found[1], square, rows.square(), columns.square()),
    ):
        expected = (a @ before.double().to(DEVICE) @ b).cpu()
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert (found[1] >= 0).all()


def test_moments_stay_where_orthonormal_projectors_do() -> None:
    """PᵀP is the identity then."""
    left, right = (Projector(torch.randperm(6, generator=generator(seed)).int()[:, None].to(DEVICE),
                             torch.ones(6, 1, device=DEVICE), 6) for seed in (0, 1))  # fmt: skip
    moment, square = torch.randn(6, 6), torch.rand(6, 6)
    found = carry_moments(moment, square, left, right, left, right)
    assert torch.equal(found[0], moment) and torch.equal(found[1], square)


def test_refused_moments() -> None:
    old, new = pair(30, 24, 9, 8, 3), pair(30, 24, 7, 10, 3)
    moment = torch.zeros(9, 8)
    with pytest.raises(SlideError, match=r"exp_avg_sq must be float32 of shape \[9, 8\]"):
        carry_moments(moment, moment.T, *old, *new)
    with pytest.raises(SlideError, match="exp_avg must be float32"):
        carry_moments(moment.double(), moment, *old, *new)
    with pytest.raises(SlideError, match="the new projectors have 24 and 30 rows"):
        carry_moments(moment, moment, *old, new[1], new[0])


def several_fits() -> list[Fit]:
    """Of matrices of which one is another's transposed one, of another shape, and of one that loses little enough."""
    whole = Projector(torch.arange(20).int()[:, None].to(DEVICE), torch.ones(20, 1, device=DEVICE), 20)
    shapes = [(48, 20), (20, 48), (32, 32), (48, 20)]
    fits = [
        Fit(low_rank(*shape, 3, seed=seed), *pair(*shape, 10, 10, 3, seed=seed), generator(seed))
        for seed, shape in enumerate(shapes)
    ]
    return [*fits, Fit(low_rank(20, 20, 3), whole, whole, generator())]


def test_matrices_of_one_shape_are_fitted_together_and_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    at = Objective.at

    def counted(objective: Objective) -> tuple[Tensor, Tensor, list[Tensor]]:
        taken.append(objective.values[0].shape[1])
        return at(objective)

    monkeypatch.setattr(Objective, "at", counted)
    steps, how = 8, {"threshold": 0.1, "steps": 8, "beta": 1e-3}
    together = refit(several_fits(), **how)
    assert taken == [3] * (steps + 1) + [1] * (steps + 1)
    alone = [refit([each], **how)[0] for each in several_fits()]
    for fit, (left, right, found), (one, other, expected) in zip(several_fits(), together, alone, strict=True):
        assert (left.indices.shape[0], right.indices.shape[0]) == fit.gradient.shape
        assert torch.equal(left.indices, fit.left.indices) and torch.equal(right.indices, fit.right.indices)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0.0)
        torch.testing.assert_close(left.values, one.values, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(right.values, other.values, rtol=1e-2, atol=1e-3)
    again = refit(several_fits(), **how)
    assert all(torch.equal(a[0].values, b[0].values) for a, b in zip(together, again, strict=True))
    monkeypatch.setattr(learning, "BATCH_BYTES", 0)  # as many as the largest takes alone
    taken.clear()
    refit(several_fits(), **how)
    assert max(taken) == 1


def test_fits_go_on_until_all_have_come_down_to_the_threshold() -> None:
    """A gradient of rank 1 has after 10 steps, one of rank 8 after 40."""
    fits = [Fit(low_rank(48, 20, rank), *pair(48, 20, 10, 10, 3), generator()) for rank in (1, 8)]
    assert all(found <= 0.2 for *_, found in refit(fits, threshold=0.2, steps=10_000, beta=0.0))
