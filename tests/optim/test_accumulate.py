"""dst += src on the CPU has the bits of torch's own addition."""

from __future__ import annotations

import itertools

import pytest
import torch

from ds_slide import _native

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def add(workers: _native.Workers, dst: torch.Tensor, src: torch.Tensor, isa: str) -> None:
    _native.accumulate(workers, dst.data_ptr(), NAMES[dst.dtype], src.data_ptr(), NAMES[src.dtype], dst.numel(), isa)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    integer = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    same = (actual.view(integer) == expected.view(integer)) | (actual.isnan() & expected.isnan())
    assert same.all(), (actual[~same][:5], expected[~same][:5])


@pytest.mark.parametrize(("dst_dtype", "src_dtype"), list(itertools.product(NAMES, NAMES)))
@pytest.mark.parametrize("numel", [0, 1, 31, 70001])
def test_bits_of_torch(isa, workers, dst_dtype, src_dtype, numel):
    generator = torch.Generator().manual_seed(numel)
    scale = 2.0 ** torch.randint(-30, 12, (numel,), generator=generator)
    dst = (torch.randn(numel, generator=generator) * scale).to(dst_dtype)
    src = (torch.randn(numel, generator=generator) * scale).to(src_dtype)
    expected = (dst.float() + src.float()).to(dst_dtype)
    if dst_dtype == src_dtype:
        assert_same(dst + src, expected)  # what torch's own kernel gives for one dtype
    add(workers, dst, src, isa)
    assert_same(dst, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_16_bit_number(isa, workers, dtype):
    """Conversions of all numbers, subnormals, infinities and NaN included; sums that round, tie and overflow."""
    numbers = torch.arange(-(1 << 15), 1 << 15).short().view(dtype)
    for shift in (0, 1, 77, 4097, 30000):
        dst, src = numbers.clone(), numbers.roll(shift)
        expected = dst + src
        add(workers, dst, src, isa)
        assert_same(dst, expected)


def test_fp32_subnormals_are_kept(isa, workers):
    dst, src = torch.full((40,), 1e-40), torch.full((40,), 3e-41)
    expected = dst + src
    add(workers, dst, src, isa)
    assert expected[0] != 0
    assert_same(dst, expected)


@pytest.mark.parametrize("dst_dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_fp32_rounds_to_every_neighbourhood(isa, workers, dst_dtype):
    """fp32 sums around every 16-bit number and the midpoints between them, where rounding is decided."""
    numbers = torch.arange(-(1 << 15), 1 << 15).short().view(dst_dtype).float()
    middles = (numbers + numbers.roll(-1)) / 2
    base = torch.cat([numbers, middles])
    bits = base.view(torch.int32)
    src = torch.cat([base, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32)])
    dst = torch.zeros(src.numel(), dtype=dst_dtype)
    expected = (dst.float() + src).to(dst_dtype)
    add(workers, dst, src, isa)
    assert_same(dst, expected)
