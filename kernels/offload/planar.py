"""What the update kernels of all rules share: the fp32 master in its two planes, zero for subnormals, the launches.

The arithmetic of an update is that of `ds_slide.optim.fp32`: every fp32 operation rounded separately (fusion into
multiply-add is switched off at launch, division and square root are the rounded ones) and subnormal operands and
results flushed to zero, as the CPU does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl

from ds_slide.errors import SlideError
from ds_slide.kernels.dtypes import KERNEL_DTYPES

BLOCK = 1024
# The compiler makes whole vectors of loads whose mask is a multiple of this many elements.
VECTOR = 16
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def flush(value):
    """`value`, or a zero of its sign when it is subnormal."""
    return tl.where(tl.abs(value) < SMALLEST_NORMAL, value * 0.0, value)


@triton.jit
def load_master(high_plane, low_plane, offsets, mask):
    """The fp32 weight of its planes, both int16."""
    high = tl.load(high_plane + offsets, mask=mask, other=0).to(tl.int32)
    low = tl.load(low_plane + offsets, mask=mask, other=0).to(tl.int32)
    return flush(((high << 16) + low).to(tl.float32, bitcast=True))


@triton.jit
def store_master(high_plane, low_plane, offsets, mask, weight):
    """Rounded half up, never half to even: every fp32 number has planes of its own (see `encode_planar`)."""
    bits = weight.to(tl.int32, bitcast=True)
    is_nan = weight != weight
    new_high = tl.where(is_nan, bits | 0x00400000, bits + 0x8000) >> 16
    new_low = tl.where(is_nan, 0, bits)
    tl.store(high_plane + offsets, new_high.to(tl.int16), mask=mask)
    tl.store(low_plane + offsets, new_low.to(tl.int16), mask=mask)


def check_planes(
    function: str,
    weight: torch.Tensor,
    remainder: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    gradient: torch.Tensor,
) -> None:
    """Raise SlideError unless all are flat [n], contiguous, on one device and of the dtypes of a planar update."""
    for name, plane, dtypes in (
        ("weight", weight, (torch.bfloat16,)),
        ("remainder", remainder, (torch.int16,)),
        *((name, state, (torch.float32,)) for name, state in states.items()),
        ("gradient", gradient, KERNEL_DTYPES),
    ):
        if plane.dtype not in dtypes or plane.dim() != 1 or not plane.is_contiguous():
            raise SlideError(
                f"{function}: {name} must be flat, contiguous and {' or '.join(map(str, dtypes))}, but it is "
                f"{plane.dtype} of shape {list(plane.shape)} and strides {list(plane.stride())}."
            )
        if plane.shape != weight.shape or plane.device != weight.device:
            raise SlideError(
                f"{function}: {name} has {plane.numel()} elements on {plane.device}, but the weight has "
                f"{weight.numel()} on {weight.device}; pass the planes of one span."
            )
        if plane.requires_grad:
            raise SlideError(
                f"{function}: {name} requires grad, but no graph can go through an update; pass its `detach()`."
            )


def vector_parts(planes: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    """`planes` cut behind the last whole vector, for one launch each: a launch that masks by an odd length reads and
    writes every element alone (136 us instead of 90 for 12 million on an H200)."""
    numel = planes[0].numel()
    if whole := numel // VECTOR * VECTOR:
        yield planes if whole == numel else [plane[:whole] for plane in planes]
    if whole < numel:
        yield [plane[whole:] for plane in planes]


def grid(numel: int) -> tuple[int]:
    """Programs of a launch over `numel` elements."""
    return (triton.cdiv(numel, BLOCK),)
