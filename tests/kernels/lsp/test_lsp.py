"""The kernels of LSP-Offload against the same products in plain torch: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ds_slide.compression.lsp import in_torch
from ds_slide.compression.lsp.projector import Projector, random_projector
from ds_slide.kernels.dtypes import KERNEL_DTYPES
from ds_slide.kernels.lsp import apply, gather_sum, sampled
from ds_slide.optim.reference import encode_split
from ds_slide.optim.rounding import keys
from ds_slide.optim.rule import fp32

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DECAY, SCALE = fp32(0.97), fp32(-0.3)
# m, n, d1, d2, r: one tile, none of them whole, several of each kind, one element, lists of very different lengths.
SHAPES = [(8, 256, 32, 64, 4), (21, 75, 9, 13, 3), (70, 300, 40, 33, 2), (1, 1, 1, 1, 1), (60, 45, 5, 6, 4)]


def pair(m: int, n: int, d1: int, d2: int, r: int) -> tuple[Projector, Projector]:
    generator = torch.Generator().manual_seed(m + n)
    return random_projector(m, d1, r, generator, DEVICE), random_projector(n, d2, r, generator, DEVICE)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Over many orders of magnitude, zeros of both signs and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(*shape, generator=generator) * 10.0 ** torch.randint(-6, 3, shape, generator=generator)
    spread[torch.rand(*shape, generator=generator) < 0.1] = -0.0
    spread[torch.rand(*shape, generator=generator) < 0.05] *= 1e-36
    return spread.to(dtype).to(DEVICE)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    kind = torch.int32 if expected.dtype == torch.float32 else torch.int16
    assert found.dtype == expected.dtype
    assert torch.equal(found.view(kind), expected.view(kind))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_compress(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    left, right = pair(*shape)
    gradient = values(*shape[:2], dtype=dtype)
    found = values(left.d, right.d, seed=1)
    expected = found.clone()
    for accumulate in (False, True, True):
        in_torch.compress_(gradient, left, right, expected, accumulate)
        gather_sum.compress_(gradient, left, right, found, accumulate)
        assert_same_bits(found, expected)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("kind", ["split", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_apply(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
    left, right = pair(*shape)
    weight, remainder = values(*shape[:2]), None
    if kind == "split":
        high, remainder = encode_split(weight)
        weight = high.view(torch.bfloat16)
    elif kind == "bf16":
        weight = weight.bfloat16()
    found = weight.clone(), None if remainder is None else remainder.clone()
    for seed in (1, 1 << 40):
        update = values(left.d, right.d, dtype=dtype, seed=seed)
        random = keys(seed, 0) if kind == "bf16" else None
        in_torch.apply_(weight, remainder, update, left, right, DECAY, SCALE, random)
        apply.apply_(*found, update, left, right, DECAY, SCALE, random)
        assert_same_bits(found[0], weight)
        if remainder is not None and found[1] is not None:
            assert_same_bits(found[1], remainder)


@pytest.mark.parametrize("shape", SHAPES)
def test_residual(shape: tuple[int, ...]) -> None:
    left, right = pair(*shape)
    gradient = values(*shape[:2], dtype=torch.bfloat16)
    compressed = values(left.d, right.d, seed=2)
    expected = in_torch.residual_square_sums(gradient, compressed, left, right)
    found = apply.residual_square_sums(gradient, compressed, left, right)
    # Two fp64 sums of the same non-negative terms.
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("shape", [*SHAPES, (9, 270, 7, 3, 3)])
def test_sampled(shape: tuple[int, ...]) -> None:
    """X [m, n]: a row less than, exactly and more than what is read at once."""
    left, _ = pair(*shape)
    generator = torch.Generator().manual_seed(0)
    sides = (left.d, left.d), shape[:2], (left.d, shape[1])
    own, matrix, factor = (torch.randn(*side, generator=generator).to(DEVICE) for side in sides)
    expected = (left.dense().double() @ own.double() + matrix.double() @ factor.double().T).gather(
        1, left.indices.long()
    )
    for found in (sampled.sampled(left, own, matrix, factor), in_torch.sampled(left, own, matrix, factor)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * shape[1] ** 0.5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_goes_where_it_belongs(bad: float) -> None:
    left, right = pair(*SHAPES[1])
    gradient = torch.ones(*SHAPES[1][:2], device=DEVICE)
    gradient[0, 0] = bad
    found = torch.empty(left.d, right.d, device=DEVICE)
    gather_sum.compress_(gradient, left, right, found, False)
    expected = (left.dense()[0] != 0)[:, None] & (right.dense()[0] != 0)
    assert torch.equal(~found.isfinite(), expected)
