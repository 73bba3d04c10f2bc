"""The product of an adapter of low rank, added to the result of its base layer: result + scaling * (inner @ weight.T).

In eager code PEFT writes the product, scales it, and adds it: three passes over tensors of the result's size, and a
fourth one backward. Here it is one pass, and none backward. Bytes of an element (bf16): 2 read and 2 written, where
eager code reads 8 and writes 6.

Arithmetic: the product is rounded to the dtype, and so is its multiple, like eager torch. Backward, a `scaling` that is
a power of two multiplies the small products, which changes no bit; another one multiplies the gradient first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ds_slide.errors import SlideError
from ds_slide.kernels.dtypes import KERNEL_DTYPES
from ds_slide.kernels.operator import operator
from ds_slide.kernels.replay import start

LARGEST_RANK = 128
"""A tile's part of `inner` and `weight` lies in registers as a whole."""
BLOCK_ROWS, BLOCK_COLUMNS = 64, 128
LEAST_RANK = 16
"""Of a product of tiles. Smaller ranks are filled up with zeros."""


@triton.jit
def _low_rank_kernel(
    result,
    inner,
    weight,
    output,
    rows,
    columns,
    rank,
    scaling,
    column_blocks,
    RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // column_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (program % column_blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = tl.arange(0, RANK)
    is_row, is_column, is_inside = row < rows, column < columns, inside < rank
    left_mask = is_row[:, None] & is_inside[None, :]
    left = tl.load(inner + row[:, None].to(tl.int64) * rank + inside[None, :], mask=left_mask, other=0.0)
    right_mask = is_column[None, :] & is_inside[:, None]
    right = tl.load(weight + column[None, :] * rank + inside[:, None], mask=right_mask, other=0.0)
    dtype = output.dtype.element_ty
    product = tl.dot(left, right, input_precision=PRECISION).to(dtype).to(tl.float32)
    product = (product * scaling).to(dtype).to(tl.float32)
    mask = is_row[:, None] & is_column[None, :]
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    base = tl.load(result + place, mask=mask, other=0.0)
    tl.store(output + place, (base.to(tl.float32) + product).to(dtype), mask=mask)


@operator("ds_slide::low_rank_addition", "(Tensor result, Tensor inner, Tensor weight, float scaling) -> Tensor")
def _low_rank_addition(result: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
    columns, rank = weight.shape
    output = result.new_empty(result.shape)
    if not output.numel():
        return output
    rows = output.numel() // columns
    result, inner, weight = result.contiguous(), inner.contiguous(), weight.contiguous()
    column_blocks = triton.cdiv(columns, BLOCK_COLUMNS)
    start(
        _low_rank_kernel,
        (triton.cdiv(rows, BLOCK_ROWS) * column_blocks,),
        result,
        inner,
        weight,
        output,
        rows,
        columns,
        rank,
        scaling,
        column_blocks,
        RANK=max(LEAST_RANK, triton.next_power_of_2(rank)),
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        PRECISION="ieee" if result.dtype == torch.float32 else "tf32",
        num_warps=4,
    )
    return output


@_low_rank_addition.register_fake
def _(result, inner, weight, scaling):  # noqa: ARG001
    return result.new_empty(result.shape)


class _Held(torch.autograd.Function):
    """inner, weight -> an empty place in the graph for their product, of its shape and without its memory."""

    @staticmethod
    def forward(ctx: Any, inner: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
        ctx.save_for_backward(inner, weight)
        ctx.scaling = scaling
        return inner.new_empty(()).expand(*inner.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        inner, weight = ctx.saved_tensors
        scaling, needs = ctx.scaling, ctx.needs_input_grad
        rows = gradients[0].reshape(-1, weight.shape[0])
        is_exact = abs(math.frexp(scaling)[0]) == 0.5  # a power of two
        scaled = rows if is_exact else rows * scaling
        of_inner = (scaled @ weight).view(inner.shape) if needs[0] else None
        of_weight = scaled.t() @ inner.reshape(-1, inner.shape[-1]) if needs[1] else None
        if is_exact and scaling != 1.0:
            of_inner = None if of_inner is None else of_inner * scaling
            of_weight = None if of_weight is None else of_weight * scaling
        return of_inner, of_weight, None


class _Addition(torch.autograd.Function):
    """result, held -> result + the product that `low_rank` has. It saves nothing."""

    @staticmethod
    def forward(_ctx: Any, result: torch.Tensor, held: torch.Tensor, low_rank: LowRank) -> torch.Tensor:  # noqa: ARG004
        return _low_rank_addition(result, low_rank.inner, low_rank.weight, low_rank.scaling)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradients[0], gradients[0], None


class LowRank:
    """scaling * (inner @ weight.T) [..., n], to be added to a result of that shape. `inner` [..., r], `weight` [n, r]
    and the result have one dtype: bf16, fp16 or fp32. r is at most `LARGEST_RANK`.

    What backward needs is saved when the object is made, and not when it is added. So a recomputation of a checkpoint
    that ends with the last saved tensor does not compute the result again where the object is made before it: the last
    product of a block of a model, a quarter of its work.

    Raises SlideError for other shapes or dtypes.
    """

    def __init__(self, inner: torch.Tensor, weight: torch.Tensor, scaling: float) -> None:
        rank = inner.shape[-1] if inner.dim() else 0
        if weight.dim() != 2 or weight.shape[1] != rank or not 0 < rank <= LARGEST_RANK:
            raise SlideError(
                f"LowRank: inner is {tuple(inner.shape)} and weight {tuple(weight.shape)}, give [..., r] and [n, r] "
                f"with r up to {LARGEST_RANK}."
            )
        if inner.dtype != weight.dtype or inner.dtype not in KERNEL_DTYPES:
            raise SlideError(
                f"LowRank: inner is {inner.dtype} and weight {weight.dtype}, give them alike, in bf16, fp16 or fp32."
            )
        self.inner = inner
        self.weight = weight
        self.scaling = float(scaling)
        self._held: torch.Tensor = _Held.apply(inner, weight, self.scaling)

    def added_to(self, result: torch.Tensor) -> torch.Tensor:
        """Return `result` [..., n] plus the product, contiguous. Raises SlideError where shape or dtype differ."""
        if result.shape != self._held.shape or result.dtype != self.inner.dtype:
            raise SlideError(
                f"LowRank: the result is {tuple(result.shape)} of {result.dtype}, the product "
                f"{tuple(self._held.shape)} of {self.inner.dtype}; give them alike."
            )
        added: torch.Tensor = _Addition.apply(result, self._held, self)
        return added
