"""The DeepSpeed config as somebody gives it, which may be a dictionary or the path of a JSON file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def as_written(config: Any) -> Mapping[str, Any] | None:
    """The config as a dictionary; None for what DeepSpeed has to judge (absent, base64, unreadable)."""
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | Path) and os.path.isfile(config):  # a long base64 text is no file, and no error
        import hjson  # type: ignore[import-untyped]  # DeepSpeed's own reader: JSON with comments, commas at the end

        try:
            with open(config) as file:
                loaded = hjson.load(file, object_pairs_hook=_without_duplicates)
        except (OSError, ValueError, RecursionError):
            return None
        return loaded if isinstance(loaded, Mapping) else None
    return None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as DeepSpeed reads it, whose own hook is not to be had without all of DeepSpeed."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found
