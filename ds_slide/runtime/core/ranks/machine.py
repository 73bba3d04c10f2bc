"""Identifies the machine, so that ranks can compare theirs."""

from __future__ import annotations

import os
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def identity(namespace: str) -> str:
    """Return a string that is equal for processes of one machine that share `namespace`, a name in /proc/self/ns. The
    host's name would not do, because containers may share it. Raises OSError where there is no /proc."""
    return f"{_BOOT.read_text().strip()} {os.readlink(f'/proc/self/ns/{namespace}')}"
