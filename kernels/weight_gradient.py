"""Sum of products of matrices in fp32: the gradient of the weight, chunk of rows by chunk of rows."""

from __future__ import annotations

from functools import cache

import torch

# Scratch of the products that have no accumulating form (see `product_kind`).
SLICE_BYTES = 64 * 2**20


@cache
def product_kind(device: torch.device, dtype: torch.dtype) -> str:
    """How an fp32 matrix can take up a product of 16-bit matrices: tried once, as versions and devices differ.

    "accumulate": cuBLAS adds to the matrix. "widen": the product comes in fp32 but has to be added by itself (torch
    before the accumulator could be of another dtype than the factors). "convert": neither exists (CPU).
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
    """fp32 matrix [a, b] += left [a, c] @ right [c, b]; with `first` the product replaces what it held."""
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


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the sum for a weight of `dtype`.

    fp16 stays fp32 until the incoming gradient is known: a sum over rows can pass 65,504 before it is divided.
    """
    return torch.float32 if dtype == torch.float16 else dtype


class WeightGradient:
    """Sum of products in fp32 that ends as one matrix [v, h] of `dtype`.

    For bf16 the first half of the rows is summed in the very memory of the result, so that beside the result there is
    one more of its size and not two: 0.62 GB for 151,936 x 2,048.
    """

    def __init__(self, weight: torch.Tensor, chunks: int) -> None:
        rows, width = weight.shape
        dtype = result_dtype(weight.dtype)
        self.result = torch.empty(rows, width, dtype=dtype, device=weight.device)
        self.parts = [self.result]
        self.in_place = dtype == torch.float32 or chunks == 1
        self.first = True
        if not self.in_place:
            half = rows // 2 // 8 * 8  # the second half of a row of logits then starts at 16 bytes too
            lower = self.result.view(-1)[: 2 * half * width].view(torch.float32).view(half, width)
            self.parts = [lower, torch.empty(rows - half, width, device=weight.device)]

    def add_(self, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add grad_logits [c, v]^T @ hidden [c, h]."""
        left = grad_logits.T
        if self.result.dtype == hidden.dtype and self.in_place and self.first:
            torch.mm(left, hidden, out=self.result)
        else:
            sizes = [part.shape[0] for part in self.parts]
            for part, rows in zip(self.parts, left.split(sizes), strict=True):
                if part.numel():
                    add_product_(part, rows, hidden, self.first)
        self.first = False

    def finish(self) -> torch.Tensor:
        if not self.in_place:
            lower, upper = self.parts
            half = lower.shape[0]
            # The rounded rows lie where other rows of the sum still are: they need a place of their own meanwhile.
            rounded = lower.to(self.result.dtype)
            self.result[:half].copy_(rounded)
            self.result[half:].copy_(upper)
        self.parts = []
        return self.result
