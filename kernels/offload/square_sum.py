"""Square sum of a flat tensor in fp64, in one pass, and the kernel that adds up partial sums in a fixed order.

It reads the input once. torch would first write an fp64 copy (8 bytes of an element for 2 read). Its reductions
accumulate in the output type only for mixed pairs, and bf16 -> fp64 is not among them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_slide.errors import SlideError
from ds_slide.kernels.constants import SEGMENT
from ds_slide.kernels.dtypes import KERNEL_DTYPES
from ds_slide.kernels.launch import Compiled, aligned, launch

# One program reads SEGMENT elements in two steps of BLOCK, with all loads of a step under way at once.
BLOCK = 8192
COMBINE_BLOCK = 4096
NUM_WARPS = 8
_COMPILED: Compiled = {}


@triton.jit
def segment_square_sum(values, number, numel, SEGMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the square sum of segment `number` of `values` [numel], fp64."""
    segment = number.to(tl.int64) * SEGMENT
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for step in range(0, SEGMENT, BLOCK):
        offsets = segment + step + tl.arange(0, BLOCK)
        value = tl.load(values + offsets, mask=offsets < numel, other=0.0).to(tl.float32)
        # The square is exact: a number of at most 24 bits has a square that fits the 53 bits of fp64.
        wide = value.to(tl.float64)
        total += wide * wide
    return tl.sum(total, axis=0)


@triton.jit
def _square_sum_kernel(values, partial, numel, SEGMENT: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    tl.store(partial + program, segment_square_sum(values, program, numel, SEGMENT, BLOCK))


@triton.jit
def combined(partial, count, BLOCK: tl.constexpr):
    """Return the sum of partial [count] fp64.

    torch's sum would split the work by the number of multiprocessors, which changes its last bits.
    """
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    step = 0
    while step < count:  # the interpreter cannot take a range of a run-time number
        offsets = step + tl.arange(0, BLOCK)
        total += tl.load(partial + offsets, mask=offsets < count, other=0.0)
        step += BLOCK
    return tl.sum(total, axis=0)


@triton.jit
def combine_kernel(partial, square_sum, count, BLOCK: tl.constexpr):
    """Write the sum of partial [count] fp64 to square_sum [] fp64, by one program."""
    tl.store(square_sum, combined(partial, count, BLOCK))


def combine(partial: torch.Tensor, total: torch.Tensor, count: int) -> None:
    """Write the sum of partial [count] fp64 to total [] fp64, without waiting."""
    launch(
        _COMPILED,
        combine_kernel,
        (partial.device, count) if aligned((partial, total)) else None,
        1,
        (partial, total, count),
        BLOCK=COMBINE_BLOCK,
        num_warps=NUM_WARPS,
    )


def _check(values: torch.Tensor) -> None:
    if values.dim() != 1 or not values.is_contiguous() or values.dtype not in KERNEL_DTYPES:
        raise SlideError(
            f"square_sum: the tensor must be flat, contiguous and bfloat16, float16 or float32, but it is "
            f"{values.dtype} of shape {list(values.shape)} and strides {list(values.stride())}."
        )
    if values.requires_grad and torch.is_grad_enabled():
        raise SlideError("square_sum: the tensor requires grad, but no graph can go through it; pass its `detach()`.")


def _launch(values: torch.Tensor) -> torch.Tensor:
    _check(values)
    numel = values.numel()
    if not numel:
        return torch.zeros((), dtype=torch.float64, device=values.device)
    segments = triton.cdiv(numel, SEGMENT)
    partial = torch.empty(segments, dtype=torch.float64, device=values.device)
    total = torch.empty((), dtype=torch.float64, device=values.device)
    launch(
        _COMPILED,
        _square_sum_kernel,
        (values.device, values.dtype, numel) if aligned((values, partial)) else None,
        segments,
        (values, partial, numel),
        SEGMENT=SEGMENT,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    combine(partial, total, segments)
    return total


_square_sum = torch.library.custom_op("ds_slide::square_sum", _launch, mutates_args=())


@_square_sum.register_fake
def _(values: torch.Tensor) -> torch.Tensor:
    _check(values)
    return values.new_empty((), dtype=torch.float64)


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of `values`, [] fp64 on its device, without waiting. It is 0 for an empty tensor.

    values: flat [n], bf16, fp16 or fp32, contiguous.

    inf and nan propagate, and nothing else makes the sum infinite. The order of the additions depends only on n.
    No autograd graph goes through it. Raises SlideError outside of `torch.no_grad()` for a tensor that requires grad,
    and for another shape, dtype or strides.
    """
    # The operator's dispatch costs the host more than the two launches: see `pack_gradients`.
    return _square_sum(values) if torch.compiler.is_compiling() else _launch(values)
