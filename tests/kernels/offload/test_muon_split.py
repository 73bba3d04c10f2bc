"""The two halves of Muon's update by kernels, against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from ds_slide.errors import SlideError
from ds_slide.kernels.offload.muon_split import BLOCK, apply_split_, nesterov_
from ds_slide.optim import muon_step
from ds_slide.optim.muon import MuonHyper, muon_rule
from ds_slide.optim.reference import decode_split, encode_split
from ds_slide.optim.rounding import random_bits, round_bf16

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SEED, SCALE = 3, 0.37


def hyper_of(momentum: float, step: int = 5) -> MuonHyper:
    rule = muon_rule(frozenset(), {}, {})
    return MuonHyper(rule, lr=0.02, momentum=momentum, weight_decay=0.1, method="gram", step=step)


def numbers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-6, 3, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * 10.0**exponents).to(dtype).to(DEVICE)


def lerp(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    """Of torch, with every operation rounded by itself."""
    own, rest = torch.tensor([weight, 1 - weight], dtype=torch.float32)
    return start + (end - start) * own if weight < 0.5 else end - (end - start) * rest


@pytest.mark.parametrize("momentum", [0.95, 0.4])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, BLOCK, 2 * BLOCK + 35])
def test_momentum_and_update_have_the_bits_of_torch(
    numel: int, dtype: torch.dtype, stored: torch.dtype, momentum: float
) -> None:
    gradient, before = numbers(numel, dtype, 1), numbers(numel, stored, 2)
    found, first = before.clone(), 2**32 - BLOCK - 5
    update = muon_step.advance_by_kernel(found, gradient, hyper_of(momentum), SCALE, SEED, first)
    scaled = gradient.float() * torch.tensor(SCALE, dtype=torch.float32)
    exact = lerp(before.float(), scaled, 1 - momentum)
    random = random_bits(SEED, 5, first, numel, DEVICE) >> 16
    expected = round_bf16(exact, random) if stored == torch.bfloat16 else exact
    assert torch.equal(found, expected)
    assert torch.equal(update, lerp(scaled, exact, momentum))
    on_cpu = before.cpu()
    other = muon_step.advance(on_cpu, gradient.cpu(), hyper_of(momentum), SCALE, SEED, first)
    torch.testing.assert_close(update.cpu(), other, rtol=1e-5, atol=1e-7)
    assert float((found.cpu() != on_cpu).float().mean()) < 0.5 or stored == torch.float32


def test_a_number_that_is_none_stays_one() -> None:
    stored = torch.zeros(64, dtype=torch.bfloat16, device=DEVICE)
    gradient = torch.full((64,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    update = muon_step.advance_by_kernel(stored, gradient, hyper_of(0.95), 1.0, SEED, 0)
    assert bool(stored.isnan().all()) and bool(update.isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, BLOCK, 2 * BLOCK + 35])
def test_masters_are_those_of_torch(numel: int, dtype: torch.dtype) -> None:
    high, low = encode_split(numbers(numel, torch.float32, 3))
    update, hyper = numbers(numel, dtype, 4), hyper_of(0.95)
    found = [high.view(torch.bfloat16).clone(), low.clone()]
    apply_split_(*found, update, 1 - hyper.lr * hyper.weight_decay, hyper.lr * 1.5)
    decay, rate = (torch.tensor(each, dtype=torch.float32) for each in (1 - 0.002, 0.02 * 1.5))
    expected = encode_split(decode_split(high, low) * decay - update.float() * rate)
    assert [torch.equal(got.view(torch.int16), want) for got, want in zip(found, expected, strict=True)] == [True, True]
    weight, remainder = high.view(torch.bfloat16).cpu(), low.cpu()
    muon_step.apply(weight, remainder, update.cpu(), 1.5, hyper)
    masters = [decode_split(*each).cpu() for each in (found, (weight, remainder))]
    torch.testing.assert_close(*masters, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda each: each.half(), "stored must be flat, contiguous and torch.float32 or torch.bfloat16"),
        (lambda each: each[::2], "stored must be flat, contiguous"),
        (lambda each: each[:8], "stored has 8 elements on .*, but the update has 16"),
    ],
)
def test_what_it_refuses(change: Callable[[torch.Tensor], torch.Tensor], match: str) -> None:
    stored, gradient, update = torch.zeros(3, 16, device=DEVICE).unbind()
    with pytest.raises(SlideError, match=match):
        nesterov_(change(stored), gradient, update, 0.95, 1.0)
