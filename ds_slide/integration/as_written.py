"""The DeepSpeed config as somebody gives it, which may be a dictionary or the path of a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def as_written(config: Any) -> Mapping[str, Any] | None:
    """The config as a dictionary; None for what DeepSpeed has to judge (absent, base64, unreadable)."""
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | Path) and os.path.isfile(config):  # a long base64 text is no file, and no error
        try:
            loaded = json.loads(Path(config).read_text())
        except ValueError:
            return None
        return loaded if isinstance(loaded, Mapping) else None
    return None
