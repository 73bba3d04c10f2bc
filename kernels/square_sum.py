"""Square sum of a flat tensor in fp64, in one pass.

Bytes: one read of the input. torch would first write an fp64 copy (8 bytes an element for 2 read) because its
reductions accumulate in the output type only for mixed pairs that exclude bf16 -> fp64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# One program reads SEGMENT elements in steps of BLOCK: 77 M elements (a block of a 3 B model) make 1,176 programs,
# enough for 132 multiprocessors, and as many partial sums, few enough for one small reduction.
SEGMENT = 65536
BLOCK = 4096


@triton.jit
def _square_sum_kernel(values, partial, numel, SEGMENT: tl.constexpr, BLOCK: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64) * SEGMENT
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for step in range(0, SEGMENT, BLOCK):
        offsets = segment + step + tl.arange(0, BLOCK)
        value = tl.load(values + offsets, mask=offsets < numel, other=0.0).to(tl.float32)
        # Exact: a bf16 or fp16 square fits the 24 bits of fp32; fp32 inputs are widened first.
        wide = value.to(tl.float64)
        total += wide * wide
    tl.store(partial + tl.program_id(0), tl.sum(total, axis=0))


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a contiguous flat tensor (bf16, fp16 or fp32) as a 0-d fp64 tensor on its device.

    inf and nan propagate. Partial sums are combined in a fixed order, so the value is reproducible.
    """
    segments = triton.cdiv(values.numel(), SEGMENT)
    partial = torch.empty(segments, dtype=torch.float64, device=values.device)
    if segments:
        _square_sum_kernel[(segments,)](values, partial, values.numel(), SEGMENT=SEGMENT, BLOCK=BLOCK, num_warps=8)
    return partial.sum()
