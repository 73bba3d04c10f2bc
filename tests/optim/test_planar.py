"""The planar master: fp32 as a bf16 plane and a 16-bit remainder plane."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_slide.optim.hyper import AdamWHyper
from ds_slide.optim.reference import decode_planar, encode_planar

# Keeps every weight as it is: what comes out is encode(decode(planes)).
FROZEN = AdamWHyper(lr=0.0, weight_decay=0.0)


def as_bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).long() & 0xFFFFFFFF


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)


def every_upper_half(lows: list[int]) -> torch.Tensor:
    """fp32 numbers with each of the 65536 upper halves and each of the lower halves in ``lows``."""
    upper = torch.arange(1 << 16) << 16
    return from_bits((upper[:, None] + torch.tensor(lows)).flatten())


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=2000, deadline=None)
def test_any_number_that_is_no_tie_comes_back_unchanged(pattern: int) -> None:
    weight = from_bits(torch.tensor([pattern]))
    hi, lo = encode_planar(weight)
    back = decode_planar(hi, lo)
    if weight.isnan():
        assert back.isnan() and hi.view(torch.bfloat16).isnan() and lo.item() == 0
        return
    if pattern & 0xFFFF == 0x8000:
        odd = pattern >> 16 & 1
        assert as_bits(back).item() == pattern + (1 if odd else -1)
    else:
        assert as_bits(back).item() == pattern
    assert hi.view(torch.bfloat16).view(torch.int16) == weight.bfloat16().view(torch.int16)


def test_the_high_plane_is_the_rounded_weight_for_every_upper_half() -> None:
    weight = every_upper_half([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    hi, lo = encode_planar(weight)
    number = ~weight.isnan()
    assert torch.equal(hi[number], weight.bfloat16().view(torch.int16)[number])
    assert not (lo == -0x8000).any(), "no tie may be left behind: decode could not resolve it"
    moved = as_bits(decode_planar(hi, lo))[number] - as_bits(weight)[number]
    ties = (as_bits(weight)[number] & 0xFFFF) == 0x8000
    assert (moved[ties].abs() == 1).all() and (moved[~ties] == 0).all()


def test_encode_rounds_a_tie_like_the_hardware_and_stays_on_its_side() -> None:
    even_tie = struct.unpack("<f", struct.pack("<I", 0x3F808000))[0]
    odd_tie = struct.unpack("<f", struct.pack("<I", 0x3F818000))[0]
    hi, lo = encode_planar(torch.tensor([even_tie, odd_tie]))
    assert hi.tolist() == [0x3F80, 0x3F82]
    assert [value & 0xFFFF for value in lo.tolist()] == [0x7FFF, 0x8001]


def test_kernels_store_planes_like_the_reference(
    isa, workers, make_planes, run_native, run_reference, assert_same_bits
):
    planes = make_planes("bf16_planar", "bf16", 1 << 18)
    # Every upper half as stored planes, with remainders on both sides of the tie and the tie itself, which the
    # decoder must read as "rounded up" however it came there.
    upper = torch.arange(1 << 16).repeat(4)
    lower = torch.tensor([0x0000, 0x7FFF, 0x8000, 0x8001]).repeat_interleave(1 << 16)
    planes.weight = torch.where(upper >= 1 << 15, upper - (1 << 16), upper).short().view(torch.bfloat16)
    planes.remainder = torch.where(lower >= 1 << 15, lower - (1 << 16), lower).short()
    planes.grad.zero_()
    expected = planes.clone()
    run_reference(expected, FROZEN)
    run_native(workers, planes, FROZEN, isa=isa)
    assert_same_bits(planes, expected)


@pytest.mark.parametrize("upper_half", [0x3F80, 0x3F81])
def test_an_update_that_lands_on_a_tie_leaves_none(isa, workers, make_planes, run_native, upper_half):
    """1.0 (or its odd neighbour) minus a step of exactly one tie: w - step has the low half 0x8000."""
    numel = 40
    target = from_bits(torch.full((numel,), (upper_half << 16) + 0x8000, dtype=torch.int64))
    step_size = 2.0**-9  # a power of two, so the product below is exact
    start = target + step_size
    planes = make_planes("bf16_planar", "fp32", numel)
    hi, lo = encode_planar(start)
    assert torch.equal(decode_planar(hi, lo), start), "the start must not be a tie itself"
    planes.weight, planes.remainder = hi.view(torch.bfloat16), lo
    # With beta1 = beta2 = 0, eps = 0 and no bias correction the update is step_size * sign(grad).
    planes.grad.fill_(1.0)
    hyper = AdamWHyper(lr=step_size, betas=(0.0, 0.0), eps=0.0, bias_correction=False)
    run_native(workers, planes, hyper, isa=isa)
    odd = upper_half & 1
    assert (planes.weight.view(torch.int16) == upper_half + odd).all()
    assert ((planes.remainder.int() & 0xFFFF) == (0x8001 if odd else 0x7FFF)).all()
    back = as_bits(decode_planar(planes.weight, planes.remainder))
    assert (back - as_bits(target) == (1 if odd else -1)).all()
