"""Shared code of the update kernels of all rules: the fp32 master in two buffers, flushing to zero, and the launches.

An update has the arithmetic of `ds_slide.optim.rounding`. Every fp32 operation is rounded separately: fusion into
multiply-add is switched off at launch, and division and square root are the rounded ones. Subnormal operands and
results are flushed to zero, like on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl

from ds_slide.errors import SlideError
from ds_slide.kernels.dtypes import KERNEL_DTYPES

BLOCK = 1024
# The compiler uses whole vectors for loads with a mask at a multiple of this many elements.
VECTOR = 16
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def flush(value):
    """Return `value`, or a zero with its sign when it is subnormal."""
    return tl.where(tl.abs(value) < SMALLEST_NORMAL, value * 0.0, value)


@triton.jit
def load_master(high_buffer, low_buffer, offsets, mask):
    """Load the fp32 weight from its two int16 buffers."""
    high = tl.load(high_buffer + offsets, mask=mask, other=0).to(tl.int32)
    low = tl.load(low_buffer + offsets, mask=mask, other=0).to(tl.int32)
    return flush(((high << 16) + low).to(tl.float32, bitcast=True))


@triton.jit
def store_master(high_buffer, low_buffer, offsets, mask, weight):
    """Store the weight rounded half up, never half to even: then each fp32 number has its own code (`encode_split`)."""
    bits = weight.to(tl.int32, bitcast=True)
    is_nan = weight != weight
    new_high = tl.where(is_nan, bits | 0x00400000, bits + 0x8000) >> 16
    new_low = tl.where(is_nan, 0, bits)
    tl.store(high_buffer + offsets, new_high.to(tl.int16), mask=mask)
    tl.store(low_buffer + offsets, new_low.to(tl.int16), mask=mask)


def check_buffers(
    function: str,
    weight: torch.Tensor,
    remainder: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    gradient: torch.Tensor,
) -> None:
    """Raise SlideError unless all are flat [n], contiguous, on one device and of the dtypes of a split update."""
    buffers = [
        ("weight", weight, (torch.bfloat16,)),
        ("remainder", remainder, (torch.int16,)),
        *((name, state, (torch.float32,)) for name, state in states.items()),
        ("gradient", gradient, KERNEL_DTYPES),
    ]
    check_flat(function, buffers, "weight", weight)
    for name, buffer, _ in buffers:
        if buffer.requires_grad:
            raise SlideError(
                f"{function}: {name} requires grad, but no graph can go through an update; pass its `detach()`."
            )


def check_flat(
    function: str,
    buffers: Iterable[tuple[str, torch.Tensor, Sequence[torch.dtype]]],
    like_name: str,
    like: torch.Tensor,
) -> None:
    """Raise SlideError unless all buffers, given with their names and dtypes, are flat and contiguous, and have the
    length and device of `like`, whose name is `like_name`."""
    for name, buffer, dtypes in buffers:
        if buffer.dtype not in dtypes or buffer.dim() != 1 or not buffer.is_contiguous():
            raise SlideError(
                f"{function}: {name} must be flat, contiguous and {' or '.join(map(str, dtypes))}, but it is "
                f"{buffer.dtype} of shape {list(buffer.shape)} and strides {list(buffer.stride())}."
            )
        if buffer.shape != like.shape or buffer.device != like.device:
            raise SlideError(
                f"{function}: {name} has {buffer.numel()} elements on {buffer.device}, but the {like_name} has "
                f"{like.numel()} on {like.device}; pass the buffers of one span."
            )


def vector_parts(buffers: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    """Cut `buffers` behind the last whole vector into parts for one launch each. A launch with a mask of odd length
    reads and writes every element alone (136 us instead of 90 for 12 million on an H200)."""
    numel = buffers[0].numel()
    if whole := numel // VECTOR * VECTOR:
        yield buffers if whole == numel else [buffer[:whole] for buffer in buffers]
    if whole < numel:
        yield [buffer[whole:] for buffer in buffers]


def grid(numel: int) -> tuple[int]:
    """Return the grid of a launch over `numel` elements."""
    return (triton.cdiv(numel, BLOCK),)
