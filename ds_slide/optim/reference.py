"""One step of any update rule in plain torch, on any device: what the C++ and GPU kernels must match bit by bit.

The arithmetic is in `ds_slide.optim.rounding`. `UpdateRule.reference_step` is the rule's own part.
"""

from __future__ import annotations

import torch

from ds_slide.optim.low_precision import CHUNK, GROUP, to_fp32
from ds_slide.optim.rounding import check_first, flush, mul, random_bits, round_8bit, round_bf16
from ds_slide.optim.rule import Elements, Hyper

# A temporary of 32-bit integers has 1 MiB and stays in a core's cache.
_PIECE = 1 << 18


def encode_split(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 ``weight`` into ``(hi, lo)``, both int16 of its shape. ``decode_split`` gives every number back.

    ``hi`` holds the bits of the weight rounded to bf16, half up: ties (low half 0x8000) go away from zero. ``lo`` is
    the fp32 bits minus the bits of ``hi``, a signed number. torch's cast rounds half to even, which would give a tie
    that went up and another that went down the same ``hi`` and ``lo``. ``hi`` differs from that cast only in ties with
    an even upper half, and is as near. From 0x7F7F8000 (3.396e38) on ``hi`` is infinity, in torch's cast too, and
    ``lo`` is negative. For infinity itself ``lo`` is 0. NaN stays NaN, but its payload is lost.
    """
    bits = weight.contiguous().view(torch.int32)
    # A NaN is made quiet. Without its low half the sum below cannot overflow.
    bits = torch.where(torch.isnan(weight), (bits | 0x00400000) & ~0xFFFF, bits)
    hi = (bits + 0x8000) >> 16
    lo = bits - (hi << 16)
    return hi.to(torch.int16), lo.to(torch.int16)


def decode_split(hi: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
    """Return the fp32 weight of the state buffers ``hi`` (int16 or bf16) and ``lo`` (int16), of one shape."""
    upper = hi.contiguous().view(torch.int16).long() << 16
    bits = (upper + lo.long()) & 0xFFFFFFFF
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)


def join_split(weight: torch.Tensor, remainder: torch.Tensor, masters: torch.Tensor) -> None:
    """Write the fp32 ``masters`` of flat bf16 weights and int16 remainders, like `decode_split`, in 32-bit arithmetic.
    This is 6 times faster and wraps where it has to."""
    bits = masters.view(torch.int32)
    for start in range(0, weight.numel(), _PIECE):
        part = slice(start, start + _PIECE)
        bits[part].copy_(weight[part].view(torch.int16)).bitwise_left_shift_(16).add_(remainder[part])


def split_into(masters: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Write the flat bf16 ``weight`` and int16 ``remainder`` of fp32 ``masters``, like `encode_split`."""
    for start in range(0, masters.numel(), _PIECE):
        part = slice(start, start + _PIECE)
        high, low = encode_split(masters[part])
        weight[part].copy_(high.view(weight.dtype))
        remainder[part].copy_(low)


@torch.no_grad()
def reference_update_(elements: Elements, hyper: Hyper, grad_scale: float = 1.0) -> None:
    """Do one step in place on contiguous tensors of one device. The gradient is multiplied by ``grad_scale`` first."""
    weight, remainder, states, grad, given_scales, seed, first = elements
    check_first(first)
    specs, constants = hyper.rule.states, hyper.constants(grad_scale)
    scales = given_scales or [None] * len(specs)
    flat = [weight.view(-1), grad.view(-1), *(state.view(-1) for state in states)]
    low = None if remainder is None else remainder.view(-1)
    # The step goes in chunks: the fp64 temporaries of a whole vocabulary matrix would be tens of gigabytes.
    for start in range(0, weight.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        w, g, *stored = (state_buffer[part] for state_buffer in flat)
        rest = None if low is None else low[part]
        groups = slice(start // GROUP, -(-(start + w.numel()) // GROUP))
        own = [None if scale is None else scale[groups] for scale in scales]
        values = [
            flush(to_fp32(state, scale, signed=spec.signed))
            for state, scale, spec in zip(stored, own, specs, strict=True)
        ]
        gradient = mul(flush(g.float()), constants[0])
        new, kept = hyper.rule.reference_step(hyper, constants, flush(_master(w, rest)), gradient, values)
        _store_master(w, rest, new)
        if all(state.dtype == torch.float32 for state in stored):
            for state, value in zip(stored, kept, strict=True):
                state.copy_(value)
            continue
        random = random_bits(seed, hyper.step, first + start, w.numel(), w.device)
        halves = (random >> 16, random & 0xFFFF)
        for state, scale, value, half, spec in zip(stored, own, kept, halves, specs, strict=False):
            _store_state(state, scale, value, half, signed=spec.signed)


def _store_state(
    stored: torch.Tensor, scale: torch.Tensor | None, values: torch.Tensor, random: torch.Tensor, *, signed: bool
) -> None:
    if scale is None:
        stored.copy_(round_bf16(values, random))
        return
    codes, scales = round_8bit(values, random, signed=signed)
    stored.copy_(codes)
    scale.copy_(scales)


def _master(weight: torch.Tensor, remainder: torch.Tensor | None) -> torch.Tensor:
    if weight.dtype == torch.bfloat16 and remainder is not None:
        return decode_split(weight, remainder)
    return weight if remainder is None else remainder


def _store_master(weight: torch.Tensor, remainder: torch.Tensor | None, value: torch.Tensor) -> None:
    if weight.dtype == torch.bfloat16 and remainder is not None:
        hi, lo = encode_split(value)
        weight.copy_(hi.view(torch.bfloat16))
        remainder.copy_(lo)
        return
    weight.copy_(value)
    if remainder is not None:
        remainder.copy_(value)
