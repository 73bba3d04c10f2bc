"""The update rule in plain torch, on any device: the statement that the C++ and GPU kernels must match bit by bit.

Every operation is done in fp64 on fp32 operands and rounded to fp32 at once. For +, -, *, / and sqrt that gives the
correctly rounded fp32 result (53 bits are at least 2 * 24 + 2, so the second rounding is harmless), and it does not
depend on how torch computes fp32 on some device: no fused multiply-add, no approximate square root, no flushing mode.
"""

from __future__ import annotations

import torch

from ds_slide.optim.hyper import AdamWConstants, AdamWHyper
from ds_slide.optim.low_precision import GROUP, to_fp32
from ds_slide.optim.rounding import check_first, random_bits, round_8bit, round_bf16

# Flush to zero as x86 processors do it (MXCSR.FTZ): a result is subnormal when it is below 2^-126 after rounding with
# an exponent range that has no lower end. From 2^-126 - 2^-151 on, such rounding gives 2^-126, which stays.
_FLUSHED_BELOW = 2.0**-126 - 2.0**-151
_CHUNK = 1 << 22


def encode_planar(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits fp32 ``weight`` into ``(hi, lo)``, both int16 of its shape; ``decode_planar`` gives every number back.

    ``hi`` holds the bits of the weight rounded to bf16, half up: ties (low half 0x8000) go away from zero. ``lo`` is
    what the fp32 bits exceed those of ``hi`` by, a signed number. Rounding half to even, as torch's cast does, would
    give a tie that went up and another that went down the same ``hi`` and ``lo``; ``hi`` differs from that cast only
    in ties with an even upper half, and is as near. From 0x7F7F8000 (3.396e38) on ``hi`` is infinity, in torch's
    cast too, and ``lo`` is negative; infinity itself has 0 there. NaN stays NaN, its payload is not kept.
    """
    bits = weight.contiguous().view(torch.int32)
    # A NaN is made quiet; without its low half the sum below cannot overflow.
    bits = torch.where(torch.isnan(weight), (bits | 0x00400000) & ~0xFFFF, bits)
    hi = (bits + 0x8000) >> 16
    lo = bits - (hi << 16)
    return hi.to(torch.int16), lo.to(torch.int16)


def decode_planar(hi: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
    """The fp32 weight of the planes ``hi`` (int16 or bf16) and ``lo`` (int16), of one shape."""
    upper = hi.contiguous().view(torch.int16).long() << 16
    bits = (upper + lo.long()) & 0xFFFFFFFF
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)


@torch.no_grad()
def adamw_reference_(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    hyper: AdamWHyper,
    grad_scale: float = 1.0,
    *,
    exp_avg_scale: torch.Tensor | None = None,
    exp_avg_sq_scale: torch.Tensor | None = None,
    seed: int = 0,
    first: int = 0,
) -> None:
    """One Adam(W) step in place on contiguous tensors of one size and device.

    ``weight`` bf16 with ``remainder`` int16 is the planar master; fp32 with None is a plain weight; fp16 with
    ``remainder`` fp32 is an fp16 copy of the fp32 master. ``grad`` is bf16, fp16 or fp32. The moments are fp32,
    bf16, or uint8 codes with their scales; the last two are rounded by random bits of (``seed``, step, element), where
    ``first`` is the number of element 0 within its unit.
    """
    check_first(first)
    constants = hyper.constants(grad_scale)
    planes = (
        [weight, exp_avg, exp_avg_sq, grad] if remainder is None else [weight, exp_avg, exp_avg_sq, grad, remainder]
    )
    start = 0
    # In chunks: the fp64 temporaries of a whole vocabulary matrix would be tens of gigabytes.
    for w, m, v, g, *rest in zip(*(plane.view(-1).split(_CHUNK) for plane in planes), strict=True):
        low = rest[0] if rest else None
        if m.dtype == torch.float32:
            _adamw_chunk_(w, low, m, v, g, constants)
        else:
            groups = slice(start // GROUP, -(-(start + w.numel()) // GROUP))
            m_scale = None if exp_avg_scale is None else exp_avg_scale[groups]
            v_scale = None if exp_avg_sq_scale is None else exp_avg_sq_scale[groups]
            moments = to_fp32(m, m_scale, signed=True), to_fp32(v, v_scale, signed=False)
            _adamw_chunk_(w, low, *moments, g, constants)
            random = random_bits(seed, hyper.step, first + start, w.numel(), w.device)
            _store_moment(m, m_scale, moments[0], random >> 16, signed=True)
            _store_moment(v, v_scale, moments[1], random & 0xFFFF, signed=False)
        start += w.numel()


def _store_moment(
    stored: torch.Tensor, scale: torch.Tensor | None, values: torch.Tensor, random: torch.Tensor, *, signed: bool
) -> None:
    if scale is None:
        stored.copy_(round_bf16(values, random))
        return
    codes, scales = round_8bit(values, random, signed=signed)
    stored.copy_(codes)
    scale.copy_(scales)


def _adamw_chunk_(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    c: AdamWConstants,
) -> None:
    g = _mul(_flush(grad.float()), c.grad_scale)
    w = _flush(_master(weight, remainder))
    m = _flush(exp_avg)
    v = _flush(exp_avg_sq)
    if c.adam_w_mode:
        w = _mul(w, c.decay)
    else:
        g = _add(g, _mul(w, c.weight_decay))
    m = _add(_mul(m, c.beta1), _mul(g, c.one_minus_beta1))
    v = _add(_mul(v, c.beta2), _mul(_mul(g, g), c.one_minus_beta2))
    denominator = _add(_mul(_round(v.double().sqrt()), c.inv_bc2_sqrt), c.eps)
    update = _mul(_round(m.double() / denominator.double()), c.step_size)
    w = _add(w, -update)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    _store_master(weight, remainder, w)


def _master(weight: torch.Tensor, remainder: torch.Tensor | None) -> torch.Tensor:
    if weight.dtype == torch.bfloat16 and remainder is not None:
        return decode_planar(weight, remainder)
    return weight if remainder is None else remainder


def _store_master(weight: torch.Tensor, remainder: torch.Tensor | None, value: torch.Tensor) -> None:
    if weight.dtype == torch.bfloat16 and remainder is not None:
        hi, lo = encode_planar(value)
        weight.copy_(hi.view(torch.bfloat16))
        remainder.copy_(lo)
        return
    weight.copy_(value)
    if remainder is not None:
        remainder.copy_(value)


def _round(exact: torch.Tensor) -> torch.Tensor:
    return torch.where(exact.abs() < _FLUSHED_BELOW, torch.copysign(torch.zeros_like(exact), exact), exact).float()


def _flush(value: torch.Tensor) -> torch.Tensor:
    return _round(value.double())


def _mul(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    return _round(a.double() * (b.double() if isinstance(b, torch.Tensor) else b))


def _add(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    return _round(a.double() + (b.double() if isinstance(b, torch.Tensor) else b))
