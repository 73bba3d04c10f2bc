"""The square sum against fp64, its fixed order, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from references.square_sum import square_sum_reference

from ds_slide.errors import SlideError
from ds_slide.kernels.offload import square_sum as module
from ds_slide.kernels.offload.square_sum import BLOCK, SEGMENT, square_sum

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def spread(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Over many orders of magnitude."""
    generator = torch.Generator().manual_seed(numel)
    exponents = torch.randint(-6, 4, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * 10.0**exponents).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, BLOCK + 1, SEGMENT - 1, SEGMENT, 3 * SEGMENT + 17])
def test_agrees_with_fp64(numel: int, dtype: torch.dtype) -> None:
    values = spread(numel, dtype)
    # Two fp64 sums of the same non-negative terms differ by at most numel * 2^-53, here 2e-11 at worst, far less seen.
    torch.testing.assert_close(square_sum(values), square_sum_reference(values), rtol=1e-13, atol=0.0)


def test_nothing_beyond_the_end_is_read() -> None:
    memory = torch.full((BLOCK,), torch.nan, device=DEVICE)
    memory[64:81] = 2.0
    assert square_sum(memory[64:81]) == 17 * 4.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, BLOCK + 904, SEGMENT + 3])
def test_what_is_not_finite_shows(bad: float, place: int) -> None:
    values = torch.ones(SEGMENT + 4, dtype=torch.bfloat16, device=DEVICE)
    values[place] = bad
    assert not torch.isfinite(square_sum(values))


def test_large_finite_values_stay_finite() -> None:
    values = torch.full((64,), torch.finfo(torch.float32).max, device=DEVICE)
    torch.testing.assert_close(square_sum(values), square_sum_reference(values), rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("count", [1, 4, 14])
def test_partial_sums_are_all_added_and_nothing_else(count: int) -> None:
    partial = torch.full((16,), torch.nan, dtype=torch.float64, device=DEVICE)
    partial[:count] = spread(count, torch.float32).double().square() / 3.0
    total = torch.full((), torch.nan, dtype=torch.float64, device=DEVICE)
    module.combine_kernel[(1,)](partial, total, count, BLOCK=4, num_warps=1)
    assert total.item() == pytest.approx(math.fsum(partial[:count].tolist()), rel=1e-15)


def test_the_same_values_elsewhere_in_memory_have_the_same_sum() -> None:
    values = spread(2 * SEGMENT + 77, torch.bfloat16)
    sums = [square_sum(torch.cat([values.new_zeros(shift), values])[shift:]) for shift in (0, 1, 64)]
    assert len({total.item() for total in sums}) == 1


def test_more_partial_sums_than_are_combined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT", 64)
    monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(module, "COMBINE_BLOCK", 4)
    values = spread(64 * 9 + 5, torch.float32)
    torch.testing.assert_close(square_sum(values), square_sum_reference(values), rtol=1e-13, atol=0.0)


def test_refusals() -> None:
    values = torch.ones(64, device=DEVICE)
    for wrong in (values.double(), values.view(8, 8), values[::2], values.int(), values[0]):
        with pytest.raises(SlideError, match="square_sum: the tensor must be flat, contiguous and bfloat16"):
            square_sum(wrong)
    values.requires_grad_()
    with pytest.raises(SlideError, match="the tensor requires grad"):
        square_sum(values)
    with torch.no_grad():
        assert square_sum(values) == 64


@pytest.mark.parametrize("numel", [0, 1000])
def test_the_operator_is_registered_well(numel: int) -> None:
    torch.library.opcheck(torch.ops.ds_slide.square_sum, (spread(numel, torch.bfloat16),))


def test_torch_compile_goes_through() -> None:
    def norm(values: torch.Tensor) -> torch.Tensor:
        return square_sum(2 * values).sqrt()

    values = spread(5000, torch.float32)
    found = torch.compile(norm, fullgraph=True, backend="aot_eager")(values)
    assert torch.equal(found.view(torch.int64), norm(values).view(torch.int64))
