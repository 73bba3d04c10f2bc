"""Products of 16-bit matrices added to an fp32 matrix. They do not use Triton: cuBLAS does it where torch allows."""

from __future__ import annotations

from functools import cache

import torch

# Scratch of the products that have no accumulating form (see `product_kind`).
SLICE_BYTES = 64 * 2**20


@cache
def product_kind(device: torch.device, dtype: torch.dtype) -> str:
    """Return how a product of 16-bit matrices is added to an fp32 matrix. Tried once, as versions and devices differ.

    "accumulate": cuBLAS adds to the matrix. "widen": the product comes in fp32 but has to be added by itself (older
    torch, where the accumulator had the dtype of the factors). "convert": neither exists (CPU).
    """
    if dtype == torch.float32:
        return "accumulate"
    factor, matrix = torch.zeros(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(matrix, factor, factor, torch.float32, out=matrix)
        return "accumulate"
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError):
        pass
    try:
        torch.ops.aten.mm.dtype_out(factor, factor, torch.float32, out=matrix)
        return "widen"
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError):
        return "convert"


def add_product_(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, first: bool) -> None:
    """Add left [a, c] @ right [c, b] to the fp32 matrix [a, b]. With `first` the product replaces its content."""
    kind = product_kind(left.device, left.dtype)
    if kind == "accumulate":
        beta = 0 if first else 1
        if left.dtype == torch.float32:
            torch.addmm(matrix, left, right, beta=beta, out=matrix)
        else:
            torch.ops.aten.addmm.dtype_out(matrix, left, right, torch.float32, beta=beta, out=matrix)
        return
    height = max(1, SLICE_BYTES // (4 * matrix.shape[1]))
    if kind == "convert":
        right = right.float()
    for part, rows in zip(matrix.split(height), left.split(height), strict=True):
        target = part if first else torch.empty_like(part)
        if kind == "widen":
            torch.ops.aten.mm.dtype_out(rows, right, torch.float32, out=target)
        else:
            torch.mm(rows.float(), right, out=target)
        if not first:
            part.add_(target)
