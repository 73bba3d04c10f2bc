"""Byte sizes as people write them in JSON: 24000000000, 24e9, "24GiB", "64 GB"."""

import math
import re

from ds_slide.config.shown import shown as as_text
from ds_slide.errors import SlideConfigError

SIZE_HELP = 'a size such as "24GiB" (2^30 bytes each), "24GB" (10^9) or a whole number of bytes'

_FACTORS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_UNITS = {name.lower(): factor for name, factor in _FACTORS.items()}
_SIZE = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
# Of a number with its sign, point and zeros: 8 EiB have 19 digits. Python refuses to read one of more than 4,300.
_MOST_DIGITS = 64
# Sizes end up in 64-bit signed integers of the C++ side.
_LARGEST = 2**63 - 1


def parse_bytes(value: float | str, name: str = "size") -> int:
    """Bytes in `value`: an int, a whole float (JSON writes 24e9 as one) or a number with a unit (B, KB, KiB ... TiB).

    `name` is what the message calls the value (its JSON path). Values that are negative, not finite, not whole bytes or
    ambiguous ("24G" may be either) raise SlideConfigError.
    """
    shown = as_text(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise SlideConfigError(f"{name} is {shown}; expected {SIZE_HELP}")
    if isinstance(value, str):
        number = _parse_text(value, name)
    elif isinstance(value, float) and not (math.isfinite(value) and value.is_integer()):
        raise SlideConfigError(f"{name} is {shown}; expected {SIZE_HELP}")
    else:
        number = int(value)
    if number < 0:
        raise SlideConfigError(f"{name} is {shown}, which is negative; expected {SIZE_HELP}")
    if number > _LARGEST:
        raise SlideConfigError(f"{name} is {shown}, which is more than 8 EiB; expected {SIZE_HELP}")
    return number


def format_bytes(number: int) -> str:
    """`number` bytes for a message: "512 B", "3.0 MiB", "24.0 GiB"."""
    if number < 2**10:
        return f"{number} B"
    for unit in ("KiB", "MiB", "GiB"):
        if number < 1024 * _FACTORS[unit]:
            return f"{number / _FACTORS[unit]:.1f} {unit}"
    return f"{number / _FACTORS['TiB']:.1f} TiB"


def _parse_text(text: str, name: str) -> int:
    shown = as_text(text)
    match = _SIZE.fullmatch(text)
    if match is None or len(match[1]) > _MOST_DIGITS:
        raise SlideConfigError(f"{name} is {shown}; expected {SIZE_HELP}")
    digits, unit = match.groups()
    if not unit:
        if "." in digits:
            raise SlideConfigError(f"{name} is {shown}, which has no unit; expected {SIZE_HELP}")
        return int(digits)
    factor = _UNITS.get(unit.lower())
    if factor is None:
        short = unit.upper()
        if short in ("K", "M", "G", "T"):
            raise SlideConfigError(
                f"{name} is {shown}; write {digits}{short}iB (powers of 1024) or {digits}{short}B (powers of 1000)"
            )
        raise SlideConfigError(f"{name} is {shown}, which has the unknown unit {unit!r}; expected {SIZE_HELP}")
    # Whole part and fraction apart: a float product would lose bytes above 2^53.
    whole, _, fraction = digits.partition(".")
    sign = -1 if whole.startswith("-") else 1
    magnitude = abs(int(whole)) * factor
    if fraction:
        magnitude += int(fraction) * factor // 10 ** len(fraction)
    return sign * magnitude
