"""Operators of kernels in eager code. What torch.compile makes of them is in the tests of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from ds_slide.kernels.gated.gated_activation import gated


class Dispatched(TorchDispatchMode):
    """Namespaces of the operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.namespaces: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.namespaces.add(function.namespace)
        return function(*args, **(kwargs or {}))


def inputs(device: str) -> list[torch.Tensor]:
    return [torch.ones(2, 8, device=device, requires_grad=True) for _ in range(2)]


def test_eager_code_does_without_the_dispatch_of_an_operator() -> None:
    """It costs the host more than the launch."""
    output = gated(*inputs("cuda" if torch.cuda.is_available() else "cpu"), "silu")
    with Dispatched() as dispatched:
        output.sum().backward()
    assert dispatched.namespaces == {"aten"}


def test_a_mode_for_dispatch_is_told_of_operators() -> None:
    with Dispatched() as dispatched:
        gated(*inputs("cuda" if torch.cuda.is_available() else "cpu"), "silu")
    assert "ds_slide" in dispatched.namespaces


def test_on_the_meta_device_nothing_is_launched() -> None:
    assert gated(*inputs("meta"), "silu").is_meta
