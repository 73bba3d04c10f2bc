"""AdamW on the planar states of a GPU-tier unit, in one pass, with the bits of the CPU kernel.

Bytes a parameter (bf16): read 2 + 2 + 4 + 4 + 2, write 2 + 2 + 4 + 4 = 26. The arithmetic is that of
`ds_slide.optim.reference`: every fp32 operation rounded separately (fusion into multiply-add is switched off at
launch, division and square root are the rounded ones) and subnormal results flushed to zero, as the CPU does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_slide.optim.hyper import AdamWHyper

BLOCK = 1024
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _flush(value):
    return tl.where(tl.abs(value) < SMALLEST_NORMAL, value * 0.0, value)  # keeps the sign, as the CPU does


@triton.jit
def _adamw_planar_kernel(
    high_plane,
    low_plane,
    exp_avg,
    exp_avg_sq,
    gradient,
    numel,
    grad_scale,
    decay,
    weight_decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    inv_bc2_sqrt,
    eps,
    step_size,
    ADAM_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(high_plane + offsets, mask=mask, other=0).to(tl.int32)
    low = tl.load(low_plane + offsets, mask=mask, other=0).to(tl.int32)
    m = _flush(tl.load(exp_avg + offsets, mask=mask, other=0.0))
    v = _flush(tl.load(exp_avg_sq + offsets, mask=mask, other=0.0))

    g = _flush(_flush(g) * grad_scale)
    w = _flush(((high << 16) + low).to(tl.float32, bitcast=True))
    if ADAM_W:
        w = _flush(w * decay)
    else:
        g = _flush(g + _flush(w * weight_decay))
    m = _flush(_flush(m * beta1) + _flush(g * one_minus_beta1))
    v = _flush(_flush(v * beta2) + _flush(_flush(g * g) * one_minus_beta2))
    denominator = _flush(_flush(tl.sqrt_rn(v) * inv_bc2_sqrt) + eps)
    w = _flush(w - _flush(_flush(tl.div_rn(m, denominator)) * step_size))

    bits = w.to(tl.int32, bitcast=True)
    upper = (bits >> 16) & 0xFFFF
    odd = upper & 1
    rest = bits & 0xFFFF
    # A remainder of exactly one half could not be told apart from its twin: nudge it by one unit (see the reference).
    rest = tl.where(rest == 0x8000, tl.where(odd == 1, 0x8001, 0x7FFF), rest)
    rounded = ((bits + 0x7FFF + odd) >> 16) & 0xFFFF
    is_nan = w != w
    new_high = tl.where(is_nan, upper | 0x0040, rounded)
    new_low = tl.where(is_nan, 0, rest)
    tl.store(high_plane + offsets, new_high.to(tl.int16), mask=mask)
    tl.store(low_plane + offsets, new_low.to(tl.int16), mask=mask)
    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, v, mask=mask)


def adamw_planar_(
    weight: torch.Tensor,
    remainder: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    hyper: AdamWHyper,
    grad_scale: float,
) -> None:
    """Update in place. Flat contiguous tensors of one length: bf16 weight, int16 remainder, fp32 moments, any
    floating gradient."""
    numel = weight.numel()
    if not numel:
        return
    constants = hyper.constants(grad_scale)
    _adamw_planar_kernel[(triton.cdiv(numel, BLOCK),)](
        weight.view(torch.int16),
        remainder,
        exp_avg,
        exp_avg_sq,
        gradient,
        numel,
        constants.grad_scale,
        constants.decay,
        constants.weight_decay,
        constants.beta1,
        constants.one_minus_beta1,
        constants.beta2,
        constants.one_minus_beta2,
        constants.inv_bc2_sqrt,
        constants.eps,
        constants.step_size,
        ADAM_W=hyper.adam_w_mode,
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
