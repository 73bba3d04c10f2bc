"""What the tests put in the place of slow products of bf16 matrices has the bits of fp32 products that are rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import quick_bf16
import torch

PRODUCTS: dict[str, Callable[..., Any]] = {
    "mm": lambda a, b, _sum, **out: torch.mm(a, b, **out),
    "bmm": lambda a, b, _sum, **out: torch.bmm(a[None], b[None], **out),
    "addmm": lambda a, b, sum, **out: torch.addmm(sum, a, b, beta=0.5, alpha=2, **out),
    "baddbmm": lambda a, b, sum, **out: torch.baddbmm(sum[None], a[None], b[None], **out),
}


@pytest.mark.skipif(quick_bf16.use() is None, reason="this processor multiplies bf16 matrices itself")
@pytest.mark.parametrize("name", quick_bf16.OPERATORS)
@pytest.mark.parametrize("kind", quick_bf16.HALVES)
def test_products_are_rounded_once(name: str, kind: torch.dtype) -> None:
    halves = [each.to(kind) for each in (torch.randn(7, 5), torch.randn(6, 5).t(), torch.randn(7, 6))]
    wide = [each.float() for each in halves]
    product = PRODUCTS[name]
    expected = product(*wide)
    assert torch.equal(product(*halves), expected.to(kind))
    for out in (torch.empty(0, dtype=kind), torch.empty_like(expected, dtype=kind)):
        assert product(*halves, out=out) is out
        assert torch.equal(out, expected.to(kind))
    given = torch.empty_like(expected)
    assert product(*wide, out=given) is given
    assert torch.equal(given, expected)


def test_gradients_are_of_the_same_type() -> None:
    weight = torch.randn(4, 5, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.linear(torch.randn(3, 5, dtype=torch.bfloat16), weight).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
