"""The passes over single elements of Muon's update on a GPU: before its products and behind them, each in one kernel.

Bytes of an element (bf16 gradient and weight, fp32 momentum): `nesterov_` reads 2 + 4 and writes 4 + 4, `apply_split_`
reads 2 + 2 + 2 and writes 2 + 2. In plain torch a momentum in bf16 alone took 400 for its random bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_slide.kernels.dtypes import KERNEL_DTYPES
from ds_slide.kernels.offload.split_master import (
    BLOCK,
    check_buffers,
    check_flat,
    grid,
    load_master,
    store_master,
    vector_parts,
)


@triton.jit
def _lerp(start, end, weight, rest):
    """Return what `torch.lerp` returns, which is exact at both ends. `rest`: one minus `weight`."""
    return tl.where(weight < 0.5, start + (end - start) * weight, end - (end - start) * rest)


@triton.jit
def _random_bits(numbers, low_key, high_key):
    """`ds_slide.optim.rounding.bits_of`, in 32-bit integers that wrap around. `numbers`: uint32."""
    x = numbers + low_key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) + high_key.to(tl.uint32)
    x = x * tl.full((1,), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["first", "low_key", "high_key"])
def _nesterov_kernel(
    momentum_buffer,
    gradient,
    update,
    numel,
    grad_scale,
    momentum,
    one_minus_momentum,
    first,
    low_key,
    high_key,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32) * grad_scale
    if ROUNDS:
        stored = tl.load(momentum_buffer + offsets, mask=mask, other=0).to(tl.int32)
        m = _lerp((stored << 16).to(tl.float32, bitcast=True), g, one_minus_momentum, momentum)
        bits = m.to(tl.uint32, bitcast=True)
        random = _random_bits(offsets.to(tl.uint32) + first.to(tl.uint32), low_key, high_key) >> 16
        rounded = tl.where(m != m, (bits >> 16) | 0x0040, (bits + random) >> 16)
        tl.store(momentum_buffer + offsets, rounded.to(tl.int16), mask=mask)
    else:
        m = _lerp(tl.load(momentum_buffer + offsets, mask=mask, other=0.0), g, one_minus_momentum, momentum)
        tl.store(momentum_buffer + offsets, m, mask=mask)
    tl.store(update + offsets, _lerp(g, m, momentum, one_minus_momentum), mask=mask)


@triton.jit
def _apply_kernel(high_buffer, low_buffer, update, numel, decay, step_size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    u = tl.load(update + offsets, mask=mask, other=0.0).to(tl.float32)
    w = load_master(high_buffer, low_buffer, offsets, mask)
    store_master(high_buffer, low_buffer, offsets, mask, w * decay - u * step_size)


def nesterov_(
    stored: torch.Tensor,
    gradient: torch.Tensor,
    update: torch.Tensor,
    momentum: float,
    grad_scale: float,
    numbers: tuple[int, int, int] = (0, 0, 0),
) -> None:
    """Advance the ``stored`` momentum in place, and write Nesterov's update of it, without waiting.

    All tensors are flat [n], contiguous and on one device. stored: fp32, or bf16, which is rounded stochastically.
    gradient: bf16, fp16 or fp32; only read, and multiplied by grad_scale. update: fp32; only written. numbers: for the
    random bits of `ds_slide.optim.rounding.bits_of`, the lower half of the first element's number, and the keys of all.
    Raises SlideError for another dtype, length, device or strides.
    """
    buffers = [
        ("stored", stored, (torch.float32, torch.bfloat16)),
        ("gradient", gradient, KERNEL_DTYPES),
        ("update", update, (torch.float32,)),
    ]
    check_flat("nesterov_", buffers, "update", update)
    rounds = stored.dtype == torch.bfloat16
    first, low_key, high_key = numbers
    for m, g, u in vector_parts((stored.view(torch.int16) if rounds else stored, gradient, update)):
        _nesterov_kernel[grid(u.numel())](
            m,
            g,
            u,
            u.numel(),
            grad_scale,
            momentum,
            1.0 - momentum,
            _signed(first),
            _signed(low_key),
            _signed(high_key),
            ROUNDS=rounds,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
        first += u.numel()


def _signed(number: int) -> int:
    """The lower 32 bits as a signed number: an argument of one type, whatever its size."""
    return ((number & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def apply_split_(
    weight: torch.Tensor, remainder: torch.Tensor, update: torch.Tensor, decay: float, step_size: float
) -> None:
    """Set the split master to ``decay`` times itself minus ``step_size`` times the update, without waiting. `weight`,
    `remainder`, and errors as of `adamw_split_`. update: bf16, fp16 or fp32; only read."""
    check_buffers("apply_split_", weight, remainder, {}, update)
    for high, low, u in vector_parts((weight, remainder, update)):
        _apply_kernel[grid(u.numel())](
            high.view(torch.int16),
            low,
            u,
            u.numel(),
            decay,
            step_size,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
