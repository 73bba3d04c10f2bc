"""The split master: fp32 as a bf16 state buffer and a 16-bit remainder state buffer, by the reference and by the
kernels."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_slide import _native
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.reference import decode_split, encode_split

from .units import Unit, assert_same_bits, native, reference, unit

# Keeps every weight as it is: what comes out is encode(decode(state buffers)).
FROZEN = AdamWHyper(lr=0.0, weight_decay=0.0)
# The bits of fp32 numbers, many of them ties.
PATTERNS = st.lists(
    st.integers(0, 2**32 - 1) | st.integers(0, 2**16 - 1).map(lambda upper: (upper << 16) + 0x8000),
    min_size=1,
    max_size=64,
)


def as_bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).long() & 0xFFFFFFFF


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)


def every_upper_half(lows: list[int]) -> torch.Tensor:
    """fp32 numbers with each of the 65536 upper halves and each of the lower halves in ``lows``."""
    upper = torch.arange(1 << 16) << 16
    return from_bits((upper[:, None] + torch.tensor(lows)).flatten())


def every_low_half(uppers: list[int]) -> torch.Tensor:
    """fp32 numbers with each of the 65536 lower halves and each of the upper halves in ``uppers``."""
    return from_bits(((torch.tensor(uppers) << 16)[:, None] + torch.arange(1 << 16)).flatten())


def as_state_buffers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition in Python's terms: the upper half of bits + 0x8000, and what the bits exceed it by."""
    bits = as_bits(weight)
    upper = (bits + 0x8000) >> 16
    return upper, bits - (upper << 16)


def assert_split(weight: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> None:
    """``hi`` and ``lo`` are the state buffers of ``weight``: by definition for numbers, a NaN and 0 for a NaN."""
    nan = weight.isnan()
    upper, rest = as_state_buffers(weight)
    assert torch.equal(hi.long()[~nan] & 0xFFFF, upper[~nan])
    assert torch.equal(lo.long()[~nan], rest[~nan])
    assert hi.view(torch.bfloat16)[nan].isnan().all() and not lo[nan].any()
    back = decode_split(hi, lo)
    # Every number comes back, so no two of them share their state buffers.
    assert torch.equal(as_bits(back)[~nan], as_bits(weight)[~nan])
    assert back[nan].isnan().all()


def assert_nearest(weight: torch.Tensor, hi: torch.Tensor) -> None:
    """As near as torch's cast, and the same but in a tie whose upper half is even: there one unit further from zero.

    In an odd one both go away from zero, up to infinity from the largest bf16 (0x7F7F) on.
    """
    number = ~weight.isnan()
    weight, hi = weight[number], hi[number]
    cast = weight.bfloat16()
    bits = as_bits(weight)
    even_tie = (bits & 0x1FFFF) == 0x8000
    assert torch.equal(hi[~even_tie], cast.view(torch.int16)[~even_tie])
    assert torch.equal(hi.int()[even_tie], cast.view(torch.int16).int()[even_tie] + 1)
    found, other = (rounded.double()[even_tie] for rounded in (hi.view(torch.bfloat16), cast))
    exact = weight.double()[even_tie]
    assert torch.equal((found - exact).abs(), (other - exact).abs())


# Zero, the least subnormal numbers, the last subnormal and the first normal upper half, 1.0 and its odd neighbour, the
# upper halves of the largest numbers, infinity with NaN, NaN alone; then the same below zero.
POSITIVE = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]
UPPERS = POSITIVE + [0x8000 + upper for upper in POSITIVE]


@given(PATTERNS)
@settings(max_examples=200, deadline=None)
def test_any_bits_are_split_by_the_definition(patterns: list[int]) -> None:
    weight = from_bits(torch.tensor(patterns))
    hi, lo = encode_split(weight)
    assert_split(weight, hi, lo)
    assert_nearest(weight, hi)


@pytest.mark.parametrize("upper", UPPERS, ids=hex)
def test_every_low_half_has_state_buffers_of_its_own(upper: int) -> None:
    weight = every_low_half([upper])
    hi, lo = encode_split(weight)
    assert_split(weight, hi, lo)
    assert_nearest(weight, hi)


def test_every_upper_half_has_state_buffers_of_its_own() -> None:
    weight = every_upper_half([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    hi, lo = encode_split(weight)
    assert_split(weight, hi, lo)
    assert_nearest(weight, hi)


def test_ties_go_away_from_zero() -> None:
    hi, lo = encode_split(from_bits(torch.tensor([0x3F808000, 0x3F818000, 0xBF808000])))
    assert [value & 0xFFFF for value in hi.tolist()] == [0x3F81, 0x3F82, 0xBF81]
    assert lo.tolist() == [-0x8000] * 3


def test_the_largest_numbers_stay_apart_from_infinity() -> None:
    """From 0x7F7F8000 on the bf16 weight is infinity, as it is in torch's cast; the remainder tells the number."""
    largest = from_bits(torch.tensor([0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000]))
    for weight in (largest, -largest):
        hi, lo = encode_split(weight)
        assert hi.view(torch.bfloat16).isinf().tolist() == weight.bfloat16().isinf().tolist() == [False] + [True] * 3
        assert lo.tolist() == [0x7FFF, -0x8000, -1, 0]
        assert torch.equal(decode_split(hi, lo), weight)


@pytest.mark.parametrize("numel", [0, 1, 31, 70001])
def test_the_kernels_split_and_join_as_the_reference(
    isa: Literal["auto", "avx512", "avx2", "portable"], workers: _native.Workers, numel: int
) -> None:
    weight = torch.cat([every_upper_half([0x0000, 0x7FFF, 0x8000]), every_low_half(UPPERS)])[:numel]
    hi, lo = torch.zeros_like(weight, dtype=torch.bfloat16), torch.zeros_like(weight, dtype=torch.int16)
    arrays = _native.SplitMasters(weight.data_ptr(), hi.data_ptr(), lo.data_ptr())
    _native.split(workers, arrays, weight.numel(), isa)
    assert_split(weight, hi.view(torch.int16), lo)
    assert all(map(torch.equal, (hi.view(torch.int16), lo), encode_split(weight)))
    expected = decode_split(hi, lo)
    weight.zero_()
    _native.join(workers, arrays, weight.numel(), isa)
    assert torch.equal(as_bits(weight), as_bits(expected))


def unit_of(weight: torch.Tensor, grad: float = 0.0) -> Unit:
    """``weight``, and no first moment, whose sign an update would give to a zero."""
    moments = [torch.zeros(weight.numel()), torch.rand(weight.numel()) * 0.01]
    return unit(FROZEN, weight, moments, torch.full((weight.numel(),), grad).bfloat16())


def flushed(weight: torch.Tensor) -> torch.Tensor:
    """What an update makes of subnormal numbers: zeros of their sign."""
    return torch.where(weight.abs() < 2.0**-126, torch.zeros(()).copysign(weight), weight)


def test_kernels_keep_every_low_half(isa, workers):
    weight = every_low_half(UPPERS)
    own = unit_of(weight)
    native(workers, own, FROZEN, isa=isa)
    assert_split(flushed(weight), own.weight.view(torch.int16), own.remainder)


def test_kernels_store_state_buffers_like_the_reference(isa, workers):
    """Every upper half as stored state buffers, NaN of all kinds included, with remainders beside the tie and in it."""
    actual = unit_of(torch.zeros(1 << 18))
    upper = torch.arange(1 << 16).repeat(4)
    lower = torch.tensor([0x0000, 0x7FFF, 0x8000, 0x8001]).repeat_interleave(1 << 16)
    actual.weight = torch.where(upper >= 1 << 15, upper - (1 << 16), upper).short().view(torch.bfloat16)
    actual.remainder = torch.where(lower >= 1 << 15, lower - (1 << 16), lower).short()
    expected = actual.clone()
    reference(expected, FROZEN)
    native(workers, actual, FROZEN, isa=isa)
    assert_same_bits(actual, expected)


@given(patterns=PATTERNS, lr=st.sampled_from([0.0, 2.0**-9, 1e-3]))
@settings(max_examples=100, deadline=None)
def test_kernels_update_any_bits_like_the_reference(isa, workers, patterns, lr):
    actual = unit_of(from_bits(torch.tensor(patterns)), 1.0)
    expected = actual.clone()
    hyper = AdamWHyper(lr=lr, weight_decay=0.1)
    reference(expected, hyper)
    native(workers, actual, hyper, isa=isa)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("upper_half", [0x3F80, 0x3F81])
def test_an_update_that_lands_on_a_tie_is_kept(isa, workers, upper_half):
    """A step of 2^-9 onto a number whose low half is 0x8000: 1.0 (or its odd neighbour) and half a unit of bf16."""
    target = from_bits(torch.full((40,), (upper_half << 16) + 0x8000, dtype=torch.int64))
    step_size = 2.0**-9  # a power of two, so the product below is exact
    # With beta1 = beta2 = 0, eps = 0 and no bias correction the update is step_size * sign(grad).
    own = unit_of(target + step_size, 1.0)
    hyper = AdamWHyper(lr=step_size, betas=(0.0, 0.0), eps=0.0, bias_correction=False)
    native(workers, own, hyper, isa=isa)
    assert (own.weight.view(torch.int16) == upper_half + 1).all()
    assert (own.remainder == -0x8000).all()
    assert torch.equal(decode_split(own.weight, own.remainder), target)
