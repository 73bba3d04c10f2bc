"""How a value that a user wrote is shown in a message: as JSON, on one line, and never longer than a part of it."""

import json
from typing import Any

MOST_CHARACTERS = 120


def shown(value: Any) -> str:
    """`value` as JSON; cut where that is long, and described by its type where it has no such form."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * MOST_CHARACTERS:
        return f"an integer of {value.bit_length():,} bits"  # Python refuses to write one of more than 4,300 digits
    try:
        text = json.dumps(value, default=repr)
    except (ValueError, TypeError, RecursionError):
        return f"a value of type {type(value).__name__} that cannot be written as JSON"
    return cut(text)


def cut(text: str) -> str:
    """`text`, or its beginning and how long it is."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}... ({len(text):,} characters)"


def shown_key(key: Any) -> str:
    """A key as a part of a JSON path: as it is where it is a plain word, else as JSON."""
    is_word = isinstance(key, str) and key.isidentifier() and key.isascii() and len(key) <= MOST_CHARACTERS
    return key if is_word else shown(key)
