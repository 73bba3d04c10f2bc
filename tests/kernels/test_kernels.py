"""GPU kernels against their torch references, bit by bit, under Triton's interpreter where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from ds_slide.kernels.adamw_planar import adamw_planar_
from ds_slide.kernels.square_sum import SEGMENT, square_sum
from ds_slide.optim.hyper import AdamWHyper
from ds_slide.optim.reference import adamw_reference_, encode_planar

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def planar_states(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """bf16 weight, remainder, moments and gradient over many orders of magnitude, subnormals among them."""
    generator = torch.Generator().manual_seed(numel)

    def spread(low: int, high: int) -> torch.Tensor:
        return torch.randn(numel, generator=generator) * torch.logspace(low, high, numel)

    high, low = encode_planar(spread(-40, 3))
    states = [high.view(torch.bfloat16), low, spread(-44, 0), spread(-22, 0).square(), spread(-40, 1).to(dtype)]
    return [state.to(DEVICE) for state in states]


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [1, 1023, 1024, 4099])
def test_adamw_has_the_bits_of_the_reference(numel: int, dtype: torch.dtype, adam_w_mode: bool) -> None:
    *expected, gradient = planar_states(numel, dtype)
    found = [state.clone() for state in expected]
    for step in (1, 2, 7):
        hyper = AdamWHyper(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, step=step, adam_w_mode=adam_w_mode)
        adamw_reference_(*expected, gradient, hyper, 0.37)
        adamw_planar_(*found, gradient, hyper, 0.37)
        for name, want, got in zip(("weight", "remainder", "exp_avg", "exp_avg_sq"), expected, found, strict=True):
            bits = torch.int32 if want.dtype == torch.float32 else torch.int16
            assert torch.equal(want.view(bits), got.view(bits)), (name, step)


def test_adamw_keeps_nan_and_infinity_apart_from_numbers() -> None:
    *states, gradient = planar_states(64, torch.bfloat16)
    gradient[3], gradient[5] = float("nan"), float("inf")
    adamw_planar_(*states, gradient, AdamWHyper(lr=1e-3), 1.0)
    assert torch.isnan(states[0][3]) and torch.isnan(states[0][5])
    others = [index for index in range(64) if index not in (3, 5)]
    assert torch.isfinite(states[0][others]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("numel", [0, 1, SEGMENT - 1, SEGMENT, 3 * SEGMENT + 17])
def test_square_sum_agrees_with_fp64(numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype).to(DEVICE)
    expected = values.double().square().sum()
    # fp64 sums of up to 2e5 squares in another order differ by about numel * 2^-53.
    torch.testing.assert_close(square_sum(values), expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_square_sum_shows_what_is_not_finite(bad: float) -> None:
    values = torch.ones(5000, dtype=torch.bfloat16, device=DEVICE)
    values[4321] = bad
    assert not torch.isfinite(square_sum(values))
