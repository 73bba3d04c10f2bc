"""Checks of the norms' kernels against their references in fp64."""

from __future__ import annotations

from collections.abc import Callable

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Large, so that its place in the formula shows, and rows of one element have a gradient.
EPS = 0.05
# y is rounded once or twice, to 8, 11 or 24 bits; gradients lose a few more by the sums.
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 5e-6}
HALF, FULL = torch.float16, torch.float32


def normal(*shape: int, dtype: torch.dtype = FULL, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    rtol = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=rtol * float(expected.abs().mean() + 1e-30))


def leaf(value: torch.Tensor | None, wide: bool = False) -> torch.Tensor | None:
    return None if value is None else (value.double() if wide else value).detach().requires_grad_()


def check(
    function: Callable,
    reference: Callable,
    inputs: list[torch.Tensor | None],
    dtype: torch.dtype,
    cotangent: Callable[[torch.Tensor], torch.Tensor] = torch.randn_like,
    view: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    **settings: object,
) -> None:
    """Outputs and gradients of `function(view(x), *weights)` against fp64 autograd through the reference."""
    found_inputs = [leaf(value) for value in inputs]
    expected_inputs = [leaf(value, wide=True) for value in inputs]
    found = function(view(found_inputs[0]), *found_inputs[1:], EPS, **settings)
    expected = reference(view(expected_inputs[0]), *expected_inputs[1:], EPS, **settings)
    if isinstance(found, torch.Tensor):
        found, expected = (found,), (expected,)
    torch.manual_seed(1)
    cotangents = [cotangent(value) for value in found]
    torch.autograd.backward(found, cotangents)
    torch.autograd.backward(expected, [value.double() for value in cotangents])
    for got, want in zip(found, expected, strict=True):
        assert_near(got, want.detach(), dtype)
    for got, want in zip(found_inputs, expected_inputs, strict=True):
        if got is not None:
            assert got.grad.dtype == got.dtype
            assert_near(got.grad, want.grad, dtype)
