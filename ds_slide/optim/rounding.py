"""Stochastic rounding in plain torch, on any device: the reference that the kernels match bit by bit.

The random bits are a hash of (seed, step, element number within the unit). So they do not depend on threads, chunks,
instruction set or tier, and a repeated step gives the same bits. csrc/update/rounding.hpp has the same hash.
"""

from __future__ import annotations

import torch

from ds_slide.errors import SlideError
from ds_slide.optim.low_precision import (
    GROUP,
    STEP_BITS,
    finish_codes,
    group_scales,
    least_level,
    levels,
    zero_code,
)

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF

Keys = tuple[int, int]
"""Two numbers of 32 bits. Together with the lower half of an element's number they give its random bits."""


def random_bits(seed: int, step: int, first: int, numel: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return 32 random bits, int64 [numel], for elements ``first`` to ``first + numel`` of a unit with ``seed``.

    The upper 16 round ``exp_avg``, the lower 16 ``exp_avg_sq``.
    """
    parts = []
    for high in range(first >> 32, (first + max(numel, 1) - 1 >> 32) + 1):
        start, stop = max(first, high << 32), min(first + numel, high + 1 << 32)
        parts.append(bits_of(keys(step_key(seed, step), high), start & _MASK32, stop - start, device))
    return torch.cat(parts)


def bits_of(element_keys: Keys, first: int, numel: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return 32 random bits, int64 [numel], for elements with ``element_keys``. The lower halves of their numbers are
    ``first`` to ``first + numel``."""
    low_key, high_key = element_keys
    # int64 wraps around like unsigned numbers, and only the lower 32 bits of a product are used.
    x = torch.arange(first, first + numel, dtype=torch.int64, device=device)
    x = (x + low_key) & _MASK32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) + high_key) & _MASK32
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def step_key(seed: int, step: int) -> int:
    """Return the 64 bits that give the keys of all elements in one step."""
    return _mix64(_mix64((seed + 0x9E3779B97F4A7C15) & _MASK64) + step & _MASK64)


def keys(step_key: int, upper_half: int) -> Keys:
    """Return the keys of elements with this upper half of their numbers, in the step of ``step_key``."""
    mixed = _mix64(step_key + upper_half & _MASK64)
    return mixed & _MASK32, mixed >> 32


def round_bf16(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round fp32 ``values`` [n] to bf16 [n], up or down with the probabilities that make the mean the value.

    ``random`` holds numbers below 2^16. NaN stays NaN, and values that bf16 can hold stay unchanged.
    """
    bits = values.contiguous().view(torch.int32).long() & _MASK32
    rounded = torch.where(values.isnan(), (bits >> 16) | 0x0040, (bits + random) >> 16)
    return torch.where(rounded >= 1 << 15, rounded - (1 << 16), rounded).to(torch.int16).view(torch.bfloat16)


def round_8bit(values: torch.Tensor, random: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(codes, scale)``, uint8 [n] and fp32 [ceil(n / 64)], of fp32 ``values`` [n] that are zero or normal.

    Each value goes to one of its two neighbours so that the mean is the value, to within 2^-17 of their distance.
    ``random`` holds numbers below 2^16. A value below the least level goes to the level or zero if ``signed``, and
    to the level otherwise: see low_precision.from_fp32.
    """
    scale = group_scales(values, signed=signed)
    level = levels(values, scale, signed=signed)
    # The random numbers are the upper 16 of 20 bits, and the lower 4 are a half: no rounding of `level` ever decides.
    fraction = (random.int() << 4) + 8
    code = (level.view(torch.int32) + fraction - zero_code(signed)) >> STEP_BITS
    kept = fraction.double() * 2.0**-STEP_BITS * least_level(signed) < level if signed else values > 0
    return finish_codes(code, kept, values, scale, signed=signed), scale


def _mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def check_first(first: int) -> None:
    """Raise SlideError unless ``first`` can be the number of a chunk's first element."""
    if first < 0 or first % GROUP != 0:
        raise SlideError(f"first is {first}, but chunks of a unit begin at multiples of {GROUP} elements.")


# ----------------------------------------------------------------------------------------------------------------------
# fp32 arithmetic in plain torch, on any device: what the C++ and GPU kernels of every rule must match bit by bit.
#
# Every operation is done in fp64 on fp32 operands and rounded to fp32 at once. For +, -, *, / and sqrt that gives the
# correctly rounded fp32 result (53 bits are at least 2 * 24 + 2, so the second rounding is harmless), and it does not
# depend on how torch computes fp32 on some device: no fused multiply-add, no approximate square root, no flushing mode.

# x86 processors flush to zero in this way (MXCSR.FTZ): a result is subnormal when it is below 2^-126 after rounding
# with an exponent range that has no lower end. From 2^-126 - 2^-151 on, such rounding gives 2^-126, which stays.
_FLUSHED_BELOW = 2.0**-126 - 2.0**-151


def rounded(exact: torch.Tensor) -> torch.Tensor:
    """Round fp64 ``exact`` to fp32. A subnormal result becomes zero with its sign."""
    return torch.where(exact.abs() < _FLUSHED_BELOW, torch.copysign(torch.zeros_like(exact), exact), exact).float()


def flush(value: torch.Tensor) -> torch.Tensor:
    return rounded(value.double())


def mul(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    return rounded(a.double() * (b.double() if isinstance(b, torch.Tensor) else b))


def add(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    return rounded(a.double() + (b.double() if isinstance(b, torch.Tensor) else b))


def sub(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return rounded(a.double() - b.double())


def div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return rounded(a.double() / b.double())


def sqrt(a: torch.Tensor) -> torch.Tensor:
    return rounded(a.double().sqrt())
