"""Products of bf16 and fp16 matrices on processors without AVX-512.

There torch computes them element by element, 4 to 20 times as slowly as products in fp32, which was a third of the time
of many tests. Here they are computed in fp32 and rounded once, as oneDNN does it on other processors. On those, nothing
is changed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

HALVES = (torch.bfloat16, torch.float16)
OPERATORS = ("mm", "bmm", "addmm", "baddbmm")


@functools.cache
def use() -> Any:
    """In this process and its forks, until it ends. None: there is nothing to do."""
    is_old = not hasattr(torch.library, "get_kernel")
    if is_old or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    library = torch.library.Library("aten", "IMPL")
    for name in OPERATORS:
        library.impl(name, _product(name), "CPU", with_keyset=True)
        library.impl(f"{name}.out", _product_into(name), "CPU", with_keyset=True)
    return library  # what it has put in place is undone when it is collected


def _product(name: str) -> Any:
    plain = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed

    def product(keys: Any, *factors: torch.Tensor, **scales: Any) -> Any:
        dtype = factors[0].dtype
        if dtype not in HALVES:
            return plain(keys, *factors, **scales)
        return plain(keys, *[each.float() for each in factors], **scales).to(dtype)

    return product


def _product_into(name: str) -> Any:
    plain = torch.library.get_kernel(f"aten::{name}.out", "CPU").call_boxed
    product = getattr(torch, name)

    def product_into(keys: Any, *factors: torch.Tensor, out: torch.Tensor, **scales: Any) -> Any:
        if factors[0].dtype not in HALVES:
            return plain(keys, *factors, out=out, **scales)
        result = product(*factors, **scales)
        return out.resize_(result.shape).copy_(result)

    return product_into
