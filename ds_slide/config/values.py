"""Sizes and paths as people write them in JSON (24e9, "24GiB", "64 GB"), and values as messages show them."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

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


def parse_bytes(value: float | str, name: str = "size") -> int:
    """Return the bytes in `value`: an int, a whole float (JSON reads 24e9 as one) or a number with a unit (B ... TiB).

    `name`: the value's name in messages (its JSON path). Raises SlideConfigError for values that are negative, not
    finite, not whole bytes or ambiguous ("24G" may be GB or GiB).
    """
    said = shown(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise SlideConfigError(f"{name} is {said}; expected {SIZE_HELP}")
    if isinstance(value, str):
        number = _parse_text(value, name)
    elif isinstance(value, float) and not (math.isfinite(value) and value.is_integer()):
        raise SlideConfigError(f"{name} is {said}; expected {SIZE_HELP}")
    else:
        number = int(value)
    if number < 0:
        raise SlideConfigError(f"{name} is {said}, which is negative; expected {SIZE_HELP}")
    if number >= 2**63:  # it ends up in a signed integer of C++ with 64 bits
        raise SlideConfigError(f"{name} is {said}, which is more than 8 EiB; expected {SIZE_HELP}")
    return number


def format_bytes(number: int) -> str:
    """Return the text of `number` bytes: "512 B", "3.0 MiB", "24.0 GiB"."""
    if number < 2**10:
        return f"{number} B"
    for unit in ("KiB", "MiB", "GiB"):
        if number < 1024 * _FACTORS[unit]:
            return f"{number / _FACTORS[unit]:.1f} {unit}"
    return f"{number / _FACTORS['TiB']:.1f} TiB"


def _parse_text(text: str, name: str) -> int:
    said = shown(text)
    match = _SIZE.fullmatch(text)
    # 8 EiB have 19 digits, sign, point and zeros apart. Python refuses to read more than 4,300 digits.
    if match is None or len(match[1]) > 64:
        raise SlideConfigError(f"{name} is {said}; expected {SIZE_HELP}")
    digits, unit = match.groups()
    if not unit:
        if "." in digits:
            raise SlideConfigError(f"{name} is {said}, which has no unit; expected {SIZE_HELP}")
        return int(digits)
    factor = _UNITS.get(unit.lower())
    if factor is None:
        short = unit.upper()
        if short in ("K", "M", "G", "T"):
            raise SlideConfigError(
                f"{name} is {said}; write {digits}{short}iB (powers of 1024) or {digits}{short}B (powers of 1000)"
            )
        raise SlideConfigError(f"{name} is {said}, which has the unknown unit {unit!r}; expected {SIZE_HELP}")
    # Whole part and fraction apart: a float product would lose bytes above 2^53.
    whole, _, fraction = digits.partition(".")
    sign = -1 if whole.startswith("-") else 1
    magnitude = abs(int(whole)) * factor
    if fraction:
        magnitude += int(fraction) * factor // 10 ** len(fraction)
    return sign * magnitude


# ----------------------------------------------------------------------------------------------------------------------
# Directories as people write them in JSON: "/local_nvme", "~/scratch", "$SCRATCH/states".
#
# There are two steps. `check_directory_text` looks only at the text, so that a JSON is judged the same everywhere.
# `expanded_directory` puts in what this process knows: home directories and environment variables.

_URL = re.compile(r"file:|[A-Za-z][A-Za-z0-9+.-]*://", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)


MOST_PATH_BYTES, MOST_NAME_BYTES = 4096, 255  # Linux's PATH_MAX, with the NUL at its end, and NAME_MAX


def check_directory_text(text: str, name: str) -> None:
    """Raise SlideConfigError for a text that can name no directory. `name`: its JSON path."""
    said = f"{name} is {shown(text)}"
    if not text.strip():
        raise SlideConfigError(f"{said}, which names no directory; name one on a local disk")
    if "\0" in text:
        raise SlideConfigError(f"{said}, which has a NUL character, as no path may; remove it")
    if _URL.match(text):
        raise SlideConfigError(f'{said}, which is a URL; write the directory itself, such as "/local_nvme"')
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        raise SlideConfigError(f"{said}, which has characters that no path may have; write it as UTF-8") from None
    # Refused here: the operating system would refuse it after the directories above the long name have been made.
    if len(encoded) >= MOST_PATH_BYTES or max(map(len, encoded.split(b"/"))) > MOST_NAME_BYTES:
        raise SlideConfigError(
            f"{said}, which is longer than a path may be ({MOST_PATH_BYTES - 1} bytes, {MOST_NAME_BYTES} for each name "
            "in it); name a shorter one"
        )


def expanded_directory(text: str, name: str) -> Path:
    """Return the absolute directory. "~" and "~user" at the beginning and "$NAME" or "${NAME}" anywhere mean what they
    mean in a shell. Raises SlideConfigError like `check_directory_text`, and for a user or a variable that does not
    exist: the text would otherwise be a directory of that odd name below the present one.
    """
    check_directory_text(text, name)
    home = os.path.expanduser(text)
    if home.startswith("~"):
        user = text.split("/", 1)[0]
        raise SlideConfigError(
            f"{name} is {shown(text)}, but there is no home directory of {shown(user[1:])}; write the directory in full"
        )
    for match in _VARIABLE.finditer(text):
        variable = match[1] or match[2] or ""
        if not os.environ.get(variable):
            raise SlideConfigError(
                f"{name} is {shown(text)}, but the environment variable {shown(variable)} is not set in this process; "
                "set it, or write the directory in full"
            )
    found = os.path.abspath(os.path.expandvars(home))
    check_directory_text(found, name)
    return Path(found)


# ----------------------------------------------------------------------------------------------------------------------
# A user's value in a message: as JSON, on one line, cut to a limit.

MOST_CHARACTERS = 120


def shown(value: Any) -> str:
    """Return `value` as JSON, cut where it is long; a value without such a form is described by its type."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * MOST_CHARACTERS:
        return f"an integer of {value.bit_length():,} bits"  # Python refuses to write more than 4,300 digits
    try:
        text = json.dumps(value, default=repr)
    except (ValueError, TypeError, RecursionError):
        return f"a value of type {type(value).__name__} that cannot be written as JSON"
    return cut(text)


def cut(text: str) -> str:
    """Return `text`, or its beginning and its length."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}... ({len(text):,} characters)"


def shown_key(key: Any) -> str:
    """Return a key as a part of a JSON path: a plain word unchanged, another key as JSON."""
    is_word = isinstance(key, str) and key.isidentifier() and key.isascii() and len(key) <= MOST_CHARACTERS
    return key if is_word else shown(key)
