"""The added product of an adapter against plain torch in fp64, forward and backward, and in a recomputation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from references.low_rank import low_rank_reference

from ds_slide.errors import SlideError
from ds_slide.kernels.lora.low_rank import BLOCK_COLUMNS, BLOCK_ROWS, LARGEST_RANK, LowRank

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative error of one rounding; Triton's interpreter truncates to bf16 instead of rounding.
ROUNDING = {torch.bfloat16: 2**-7 if DEVICE == "cpu" else 2**-8, torch.float16: 2**-11, torch.float32: 2**-23}
SHAPES = [((2, 3), 5, 4), ((BLOCK_ROWS + 3,), BLOCK_COLUMNS + 6, 16), ((1, 2, 2), 40, 33), ((7,), 8, LARGEST_RANK)]


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(DEVICE)


def inputs_of(leading: tuple[int, ...], columns: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = ((*leading, columns), (*leading, rank), (columns, rank))
    return [draw(shape, dtype, seed).requires_grad_() for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("scaling", [2.0, 1.7])
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("leading", "columns", "rank"), SHAPES)
def test_values_and_gradients_agree_with_fp64(
    leading: tuple[int, ...], columns: int, rank: int, dtype: torch.dtype, scaling: float
) -> None:
    given = inputs_of(leading, columns, rank, dtype)
    wide = [each.detach().double().requires_grad_() for each in given]
    found = LowRank(*given[1:], scaling).added_to(given[0])
    expected = low_rank_reference(*wide, scaling)
    gradient = draw((*leading, columns), dtype, 3)
    got = torch.autograd.grad(found, given, gradient)
    want = torch.autograd.grad(expected, wide, gradient.double())
    assert found.dtype == dtype and found.is_contiguous()
    assert torch.equal(got[0], gradient)
    for one, other, terms in zip((found, *got), (expected, *want), (rank, 1, columns, len(gradient)), strict=True):
        # Three roundings of values as large as the largest ones, and the sums of the products.
        error = 3 * ROUNDING[dtype] * float(other.abs().max()) + 2**-20 * terms
        torch.testing.assert_close(one.double(), other, rtol=0, atol=error)


@pytest.mark.parametrize("layout", ["transposed", "every other column"])
def test_results_in_another_order_of_memory(layout: str) -> None:
    result, inner, weight = (each.detach() for each in inputs_of((6,), 10, 4, torch.float32))
    other = result.t().contiguous().t() if layout == "transposed" else result.repeat_interleave(2, dim=1)[:, ::2]
    assert torch.equal(LowRank(inner, weight, 0.5).added_to(other), LowRank(inner, weight, 0.5).added_to(result))


def test_no_tokens() -> None:
    """As for an expert that no token was routed to."""
    given = inputs_of((0,), 10, 4, torch.float32)
    found = LowRank(*given[1:], 2.0).added_to(given[0])
    gradients = torch.autograd.grad(found.sum(), given)
    assert [tuple(each.shape) for each in gradients] == [(0, 10), (0, 4), (10, 4)]
    assert not gradients[2].any()


def test_only_what_needs_a_gradient_gets_one() -> None:
    result, inner, weight = inputs_of((3,), 10, 4, torch.float32)
    found = LowRank(inner.detach(), weight, 2.0).added_to(result.detach())
    (gradient,) = torch.autograd.grad(found.sum(), [weight])
    torch.testing.assert_close(gradient, 2 * inner.detach().sum(0).expand(10, 4))
    with torch.no_grad():
        assert not LowRank(inner, weight, 2.0).added_to(result).requires_grad


def test_a_recomputation_ends_before_the_result() -> None:
    """What backward needs is saved before the base's product, which a recomputation then leaves out."""
    x, base, inner, weight = (
        draw(shape, torch.float32, seed).requires_grad_(seed > 1)
        for seed, shape in enumerate(((5, 8), (10, 8), (4, 8), (10, 4)))
    )
    x.requires_grad_()
    products = []

    class Product(torch.autograd.Function):
        """Saves nothing by itself, like the product of a packed weight."""

        @staticmethod
        def forward(_ctx, x):
            products.append("base")
            return x @ base.t()

        @staticmethod
        def backward(_ctx, gradient):
            return gradient @ base

    def layer(x: torch.Tensor) -> torch.Tensor:
        low_rank = LowRank(functional.linear(x, inner), weight, 2.0)
        return low_rank.added_to(Product.apply(x))

    expected = torch.autograd.grad(layer(x).sum(), (x, inner, weight))
    products.clear()
    found = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), (x, inner, weight))
    assert products == ["base"]
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("inner", "weight", "result", "message"),
    [
        ((3, 4), (10, 5), (3, 10), "r up to 128"),
        ((3, 129), (10, 129), (3, 10), "r up to 128"),
        ((3, 4), (10, 4), (3, 11), "give them alike"),
    ],
)
def test_other_shapes_are_refused(
    inner: tuple[int, int], weight: tuple[int, int], result: tuple[int, int], message: str
) -> None:
    with pytest.raises(SlideError, match=message):
        LowRank(torch.ones(inner), torch.ones(weight), 1.0).added_to(torch.ones(result))


def test_other_data_types_are_refused() -> None:
    with pytest.raises(SlideError, match="give them alike"):
        LowRank(torch.ones(3, 4).bfloat16(), torch.ones(10, 4), 1.0)
    with pytest.raises(SlideError, match="give them alike"):
        LowRank(torch.ones(3, 4), torch.ones(10, 4), 1.0).added_to(torch.ones(3, 10).bfloat16())
