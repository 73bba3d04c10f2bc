"""Compression and the update of a weight against dense products in fp64, and AdamW to the bit through permutations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_slide.compression.lsp import in_torch
from ds_slide.compression.lsp.projection import compress, decompress_apply, project
from ds_slide.compression.lsp.projector import Projector, random_projector
from ds_slide.errors import SlideError
from ds_slide.kernels.dtypes import KERNEL_DTYPES
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.reference import decode_split, encode_split, reference_update_
from ds_slide.optim.rounding import keys, step_key
from ds_slide.optim.rule import Elements

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
sides, dimensions, non_zeros = st.integers(1, 40), st.integers(1, 20), st.integers(1, 5)
# Sums of at most 40 and 40 terms, each rounded twice at most, and a few roundings more.
RELATIVE = 200 * 2**-24


def pair(m: int, n: int, d1: int, d2: int, r: int) -> tuple[Projector, Projector]:
    generator = torch.Generator().manual_seed(m * n + d1)
    drawn = (random_projector(rows, d, min(r, d), generator, DEVICE) for rows, d in ((m, d1), (n, d2)))
    return next(drawn), next(drawn)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def permutation(size: int, seed: int) -> Projector:
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).int()
    return Projector(order[:, None].to(DEVICE), torch.ones(size, 1, device=DEVICE), size)


def orthogonal(size: int, seed: int) -> Projector:
    """A dense one, r = d."""
    indices = torch.arange(size, dtype=torch.int32).repeat(size, 1)
    return Projector(indices.to(DEVICE), torch.linalg.qr(normal(size, size, seed=seed)).Q.contiguous(), size)


def empty(left: Projector, right: Projector) -> Tensor:
    return torch.full((left.d, right.d), torch.nan, device=DEVICE)


@settings(deadline=None, max_examples=60)
@given(sides, sides, dimensions, dimensions, non_zeros, st.sampled_from(KERNEL_DTYPES))
def test_compress_is_the_dense_product(m: int, n: int, d1: int, d2: int, r: int, dtype: torch.dtype) -> None:
    left, right = pair(m, n, d1, d2, r)
    dense = left.dense(torch.float64), right.dense(torch.float64)
    out, total, bound = empty(left, right), 0, 0
    for micro_batch in range(3):
        gradient = normal(m, n, seed=micro_batch, dtype=dtype)
        compress(gradient, left, right, out, accumulate=micro_batch > 0)
        total += dense[0].T @ gradient.double() @ dense[1]
        bound += dense[0].abs().T @ gradient.double().abs() @ dense[1].abs()
        assert ((out - total).abs() <= RELATIVE * bound).all()


@settings(deadline=None, max_examples=60)
@given(sides, sides, dimensions, dimensions, non_zeros, st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_update_is_the_dense_product(m: int, n: int, d1: int, d2: int, r: int, dtype: torch.dtype) -> None:
    left, right = pair(m, n, d1, d2, r)
    weight, update = normal(m, n), normal(d1, d2, seed=1, dtype=dtype)
    high, low = encode_split(weight)
    split = high.view(torch.bfloat16), low
    dense = [one.dense(torch.float64) for one in (left, right)]
    expected = 0.9 * weight.double() - 0.3 * (dense[0] @ update.double() @ dense[1].T)
    bound = weight.double().abs() + dense[0].abs() @ update.double().abs() @ dense[1].abs().T
    decompress_apply(weight, None, update, left, right, decay=0.9, scale=-0.3)
    assert ((weight - expected).abs() <= RELATIVE * bound).all()
    decompress_apply(*split, update, left, right, decay=0.9, scale=-0.3)
    assert torch.equal(decode_split(*split), weight)


def test_stochastic_rounding_is_fair_and_depends_on_the_seed() -> None:
    left, right = permutation(64, 0), permutation(64, 1)
    # A quarter of the way from 1 to the next bf16 number.
    update = torch.full((64, 64), 2.0**-9, device=DEVICE)
    results = []
    for seed in (1, 1, 2):
        weight = torch.ones(64, 64, dtype=torch.bfloat16, device=DEVICE)
        decompress_apply(weight, None, update, left, right, decay=1.0, scale=1.0, keys=keys(seed, 0))
        assert set(weight.unique().tolist()) == {1.0, 1 + 2.0**-7}
        results.append(weight)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    # 4096 draws: a standard deviation of 0.7 %.
    assert abs((results[0] > 1).float().mean() - 0.25) < 0.034


def test_the_mean_of_rounded_updates_is_the_dense_product() -> None:
    left, right, seeds = *pair(16, 24, 6, 8, 3), 1000
    left.values[2] = 0.0  # a row that is 0.75 * 1 then, which bf16 holds
    start, update = normal(16, 24, dtype=torch.bfloat16), 0.01 * normal(6, 8, seed=1)
    start[2] = 1.0
    exact = 0.75 * start.double() + left.dense(torch.float64) @ update.double() @ right.dense(torch.float64).T
    total = torch.zeros_like(exact)
    distance = 2.0 ** (exact.abs().log2().floor() - 7)  # of the two bf16 numbers beside each
    for step in range(seeds):
        weight = start.clone()
        decompress_apply(weight, None, update, left, right, decay=0.75, scale=1.0, keys=keys(step_key(0, step), 5))
        assert ((weight.double() - exact).abs() < distance).all()
        assert (weight[2] == 0.75).all()
        total += weight.double()
    # A draw between two numbers has at most half of their distance as its standard deviation.
    assert ((total / seeds - exact).abs() <= 4.5 * distance / 2 / seeds**0.5).all()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_permutations_give_adamw_to_the_bit(weight_decay: float) -> None:
    size = 24
    left, right = permutation(size, 3), permutation(size, 4)
    start = normal(size, size) * torch.logspace(-39, 1, size, device=DEVICE)
    start[0, :4] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    high, low = encode_split(start)
    found = [high.view(torch.bfloat16), low]
    expected = [each.clone() for each in found]
    moments, compressed_moments = torch.zeros(2, size, size).to(DEVICE), torch.zeros(2, size, size).to(DEVICE)
    for step in (1, 2, 3):
        gradient = normal(size, size, seed=step, dtype=torch.bfloat16) * torch.logspace(-30, 0, size, device=DEVICE)
        gradient[0, :2], gradient[0, 2:4] = 0.0, -0.0
        gradient = gradient.bfloat16()
        hyper = AdamWHyper(lr=3e-3, betas=(0.9, 0.95), weight_decay=weight_decay, step=step)
        reference_update_(Elements(*expected, list(moments), gradient), hyper)
        compressed = empty(left, right)
        compress(gradient, left, right, compressed, accumulate=False)
        assert torch.equal(compressed[left.indices.long(), right.indices.view(-1).long()], gradient.float())
        without_decay = AdamWHyper(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, step=step)
        update = torch.full((size, size), -0.0, device=DEVICE)
        reference_update_(Elements(update, None, list(compressed_moments), compressed), without_decay)
        decompress_apply(*found, update, left, right, decay=hyper.constants().decay, scale=1.0)
        for got, wanted in zip(found, expected, strict=True):
            assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


def test_dense_orthogonal_projectors_give_sgd() -> None:
    left, right = orthogonal(20, 5), orthogonal(30, 6)
    weight, gradient, compressed = normal(20, 30), normal(20, 30, seed=1), empty(left, right)
    expected = weight - 0.1 * gradient
    compress(gradient, left, right, compressed, accumulate=False)
    decompress_apply(weight, None, compressed, left, right, decay=1.0, scale=-0.1)
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_goes_where_it_belongs(bad: float) -> None:
    left, right = pair(9, 12, 6, 7, 2)
    reached = (left.dense()[3] != 0)[:, None] & (right.dense()[5] != 0)
    gradient, compressed = normal(9, 12), empty(left, right)
    gradient[3, 5] = bad
    compress(gradient, left, right, compressed, accumulate=False)
    assert torch.equal(~compressed.isfinite(), reached)
    weight, update = normal(9, 12), normal(6, 7)
    update[2, 4] = bad
    decompress_apply(weight, None, update, left, right, decay=1.0, scale=1.0)
    assert torch.equal(~weight.isfinite(), (left.dense()[:, 2] != 0)[:, None] & (right.dense()[:, 4] != 0))


def test_parts_of_a_weight_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = pair(11, 7, 5, 4, 2)
    update, weights, sums = normal(5, 4), [], []
    for part in (1 << 22, 15):
        monkeypatch.setattr(in_torch, "_PART", part)
        weight = normal(11, 7, dtype=torch.bfloat16)
        in_torch.apply_(weight, None, update, left, right, 1.0, 0.5, keys(7, 0))
        weights.append(weight)
        sums.append(in_torch.residual_square_sums(normal(11, 7), update, left, right))
    assert torch.equal(*weights)
    torch.testing.assert_close(*sums, rtol=1e-13, atol=0.0)


def test_refusals() -> None:
    left, right = pair(8, 6, 4, 3, 2)
    gradient, out, weight = normal(8, 6), empty(left, right), normal(8, 6)
    remainder = torch.zeros(8, 6, dtype=torch.int16, device=DEVICE)
    for wrong in (gradient.T, gradient.double(), gradient[:, ::2], gradient[0], gradient[:5]):
        with pytest.raises(SlideError, match=r"compress: gradient must be contiguous, .* of shape \[8, 6\]"):
            compress(wrong, left, right, out, accumulate=False)
    with pytest.raises(SlideError, match="compress: gradient requires grad"):
        compress(gradient.clone().requires_grad_(), left, right, out, accumulate=False)
    with pytest.raises(SlideError, match="compress: gradient is on meta"):
        compress(gradient.to("meta"), left, right, out, accumulate=False)
    with pytest.raises(SlideError, match="compress: out must be"):
        compress(gradient, left, right, out.T, accumulate=False)
    for given_weight, given_remainder, name in (
        (weight, remainder, "weight"),
        (weight.half(), None, "weight"),
        (weight.bfloat16(), remainder.int(), "remainder"),
    ):
        with pytest.raises(SlideError, match=f"decompress_apply: {name} must be"):
            decompress_apply(given_weight, given_remainder, out, left, right, decay=1.0, scale=1.0)
    with pytest.raises(SlideError, match="decompress_apply: update must be"):
        decompress_apply(weight, None, out.half(), left, right, decay=1.0, scale=1.0)
    with pytest.raises(SlideError, match=r"project: matrix must be .* of shape \[8, 3\]"):
        project(normal(7, 3), left)
