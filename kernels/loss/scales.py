"""The divisor of a loss and its gradients, computed on the device.

The gradient of the logits is (softmax - target) * mantissa, where 1 / count = mantissa * power, 1 <= mantissa < 2.
The power of two is applied in the backward pass. With all of 1 / count inside, fp16 would flush most of the gradients
to zero. With all of it outside, bf16 would round every gradient once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_slide.kernels.loss.arguments import MEAN

SCALE_BLOCK = 4096


@triton.jit
def _divisor_kernel(
    labels, rows, ignore_index, divisor, scales, COUNT: tl.constexpr, FROM_MEMORY: tl.constexpr, BLOCK: tl.constexpr
):
    """Write scales = (1 / count, its mantissa, its power of two)."""
    if COUNT:
        counted = tl.zeros((BLOCK,), dtype=tl.int32)
        start = 0
        # The loop is no range: the interpreter needs constant bounds, and rows differ from batch to batch.
        while start < rows:
            offsets = start + tl.arange(0, BLOCK)
            label = tl.load(labels + offsets, mask=offsets < rows, other=ignore_index)
            counted += (label != ignore_index).to(tl.int32)
            start += BLOCK
        count = tl.sum(counted, axis=0).to(tl.float32)
    elif FROM_MEMORY:
        count = tl.load(divisor).to(tl.float32)
    else:
        count = tl.full((), divisor, dtype=tl.float32)
    scale = 1.0 / count
    power = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # A power of 0 or inf (count of 0, inf or nan) has no mantissa. Then the scale itself is used, so that it shows.
    power = tl.where((power > 0.0) & (power < float("inf")), power, 1.0)
    tl.store(scales, scale)
    tl.store(scales + 1, scale / power)
    tl.store(scales + 2, power)


@triton.jit
def _scale_kernel(source, destination, grad_loss, scales, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    scale = tl.load(grad_loss).to(tl.float32) * tl.load(scales + 2)
    value = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    tl.store(destination + offsets, value.to(destination.dtype.element_ty), mask=mask)


def fill_scales_(
    scales: torch.Tensor, labels: torch.Tensor, ignore_index: int, division: int, divisor: torch.Tensor | float
) -> None:
    """Write scales [3] fp32 = (1 / count, its mantissa, its power of two).

    For MEAN the count is the number of labels [n], int64, other than `ignore_index`, else `divisor`, a number or 0-d.
    """
    _divisor_kernel[(1,)](
        labels,
        labels.shape[0],
        ignore_index,
        divisor,
        scales,
        COUNT=division == MEAN,
        FROM_MEMORY=isinstance(divisor, torch.Tensor),
        BLOCK=SCALE_BLOCK,
        num_warps=8,
    )


def apply_scale_(
    destination: torch.Tensor, source: torch.Tensor, grad_loss: torch.Tensor, scales: torch.Tensor
) -> None:
    """Write source * grad_loss * scales[2], rounded once, to destination. Both are contiguous and of one shape.
    grad_loss is 0-d."""
    numel = source.numel()
    if numel:
        grid = (triton.cdiv(numel, SCALE_BLOCK),)
        _scale_kernel[grid](source, destination, grad_loss, scales, numel, BLOCK=SCALE_BLOCK, num_warps=8)
