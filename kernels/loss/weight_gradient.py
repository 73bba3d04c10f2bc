"""Sum of products of matrices in fp32: the gradient of the weight, in chunks of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_slide.kernels.loss.products import add_product_


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the data type of the sum for a weight of `dtype`.

    For fp16 the sum stays fp32 until the incoming gradient is known: it can pass 65,504 before it is divided.
    """
    return torch.float32 if dtype == torch.float16 else dtype


@triton.jit
def _round_kernel(sums, others, result, WIDTH: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr):
    """Round a row of `result` [h] from its sums: `sums` [LEFT], which lie in the memory of the same row, and
    `others`."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    left = tl.load(sums + row * (WIDTH // 2) + lanes, mask=lanes < LEFT)
    right = tl.load(others + row * (WIDTH - LEFT) + lanes, mask=lanes < WIDTH - LEFT)
    # The warps hold different parts of the row, so none may write before all have read.
    tl.debug_barrier()
    tl.store(result + row * WIDTH + lanes, left.to(result.dtype.element_ty), mask=lanes < LEFT)
    tl.store(result + row * WIDTH + LEFT + lanes, right.to(result.dtype.element_ty), mask=lanes < WIDTH - LEFT)


class WeightGradient:
    """Sum of products in fp32 that ends as one matrix [v, h] of `dtype`.

    For bf16 the left half of the columns is summed in the memory of the result: half a row in fp32 takes the bytes of a
    whole row in bf16. So the sum takes one matrix of the result's size beside it, not two: 0.62 GB for
    151,936 x 2,048. Halves of the rows would save the same, but their products take 2 % longer there, 8 % for
    128,256 x 4,096, and rounding them needs its own memory.
    """

    def __init__(self, weight: torch.Tensor, chunks: int) -> None:
        rows, width = weight.shape
        dtype = result_dtype(weight.dtype)
        self.result = torch.empty(rows, width, dtype=dtype, device=weight.device)
        self.parts = [self.result]
        self.in_place = dtype == torch.float32 or chunks == 1
        self.first = True
        if not self.in_place:
            if width % 2:  # a row of an odd number of bf16 cannot hold numbers of four bytes
                self.parts = [torch.empty(rows, width, device=weight.device)]
                return
            left = width // 2 // 8 * 8  # the other columns of `hidden` then start at 16 bytes, too
            lower = self.result.view(torch.float32)[:, :left]
            self.parts = [lower, torch.empty(rows, width - left, device=weight.device)]

    def add_(self, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add grad_logits [c, v]^T @ hidden [c, h]."""
        left = grad_logits.T
        if self.result.dtype == hidden.dtype and self.in_place and self.first:
            torch.mm(left, hidden, out=self.result)
        else:
            sizes = [part.shape[1] for part in self.parts]
            for part, columns in zip(self.parts, hidden.split(sizes, dim=1), strict=True):
                if part.numel():
                    add_product_(part, left, columns, self.first)
        self.first = False

    def finish(self) -> torch.Tensor:
        """Return the sum, rounded once."""
        if not self.in_place:
            self._round()
        self.parts = []
        return self.result

    def _round(self) -> None:
        if len(self.parts) == 1:
            self.result.copy_(self.parts[0])
            return
        lower, upper = self.parts
        rows, width = self.result.shape
        block = triton.next_power_of_2(upper.shape[1])
        _round_kernel[(rows,)](
            lower,
            upper,
            self.result,
            WIDTH=width,
            LEFT=lower.shape[1],
            BLOCK=block,
            num_warps=min(max(block // 256, 1), 16),
        )
