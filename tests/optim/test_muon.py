"""Muon's orthogonal updates beside DeepSpeed's and beside fp64; matrices of experts and heads; scales; refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.muon import original_muon
from torch.utils.flop_counter import FlopCounterMode

from ds_slide.errors import SlideConfigError
from ds_slide.optim.muon import Method, flop, iterated, matrices_of, muon_rule, orthogonal

METHODS: tuple[Method, ...] = ("gram", "standard")
SHAPES = [(1, 24, 64), (1, 64, 24), (1, 32, 32), (3, 16, 40)]


def matrix(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_products_are_those_of_deepspeed(method: Method, shape: tuple[int, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(original_muon, "ns_compute_dtype", lambda *_: torch.float32)
    theirs = {
        "gram": original_muon.zeropower_via_gram_newtonschulz,
        "standard": original_muon.zeropower_via_newtonschulz5,
    }
    with torch.compiler.set_stance("force_eager"):
        expected = theirs[method](matrix(shape), steps=5)
    assert torch.allclose(orthogonal(matrix(shape), method, torch.float32), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-5), (torch.float16, 0.02), (torch.bfloat16, 0.15)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_products_in_short_types_are_near_those_in_fp64(
    method: Method, shape: tuple[int, ...], dtype: torch.dtype, most: float
) -> None:
    """The distance, over the norm of the result. bf16 has 8 bits, and five iterations amplify small singular values."""
    exact = orthogonal(matrix(shape).double(), method, torch.float64)
    found = orthogonal(matrix(shape), method, dtype)
    assert found.dtype == dtype
    assert float((found.double() - exact).norm() / exact.norm()) < most
    values = torch.linalg.svdvals(exact)
    assert float(values.min()) > 0.4  # of this matrix: small singular values come near to 1
    assert float(values.max()) < 1.3


def test_both_methods_are_one_iteration() -> None:
    for shape in SHAPES:
        both = [orthogonal(matrix(shape).double(), method, torch.float64) for method in METHODS]
        assert torch.allclose(*both, atol=1e-12)


def test_experts_and_heads_are_matrices_of_their_own() -> None:
    experts, heads = matrices_of((3, 16, 40)), matrices_of((48, 40), 3)
    assert experts.shape == heads.shape == (3, 16, 40)
    together = orthogonal(matrix((3, 16, 40)), "gram", torch.float32)
    for index in range(3):
        alone = orthogonal(matrix((3, 16, 40))[index : index + 1], "gram", torch.float32)
        assert torch.allclose(together[index], alone[0], atol=1e-6)
    assert matrices_of((8, 4, 3, 3)).shape == (1, 8, 36)


def test_scales() -> None:
    assert matrices_of((64, 16)).scale("deepspeed") == 2.0
    assert matrices_of((16, 64)).scale("deepspeed") == 1.0
    assert matrices_of((3, 64, 16)).scale("deepspeed") == 2.0
    assert matrices_of((64, 64), 16).scale("deepspeed") == 1.0  # of a head of 4 x 64
    assert matrices_of((8, 4, 3, 3)).scale("deepspeed") == 1.0
    for shape in ((64, 16), (16, 64)):
        assert matrices_of(shape).scale("moonlight") == pytest.approx(0.2 * math.sqrt(64))


@pytest.mark.parametrize(("name", "value"), [("momentum", 1.0), ("lr", -1.0), ("ns_method", "svd")])
def test_hyper_parameters_out_of_range_are_refused(name: str, value: Any) -> None:
    group = {"use_muon": True, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram", name: value}
    with pytest.raises(SlideConfigError, match=f"'{name}' is {value}"):
        muon_rule(frozenset(), {}, {}).hyper_of(group, 1, None)


@pytest.mark.parametrize("shape", [(1, 24, 64), (1, 32, 32), (2, 16, 40)], ids=str)
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_the_flop_are_those_of_the_products(method: Method, shape: tuple[int, int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        iterated(torch.randn(shape), method)
    assert flop(shape, method) == counter.get_total_flops()
