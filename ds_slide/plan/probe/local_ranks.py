"""How many ranks share this machine."""

from __future__ import annotations

import os


def local_ranks() -> int:
    """Ranks on this machine, as launchers announce them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
