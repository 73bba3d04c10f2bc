"""Which machine this is, for ranks that compare theirs."""

from __future__ import annotations

import os
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def identity(namespace: str) -> str:
    """The same for processes of one machine that share `namespace`, a name in /proc/self/ns: not the host's name, which
    containers may share. OSError where there is no /proc."""
    return f"{_BOOT.read_text().strip()} {os.readlink(f'/proc/self/ns/{namespace}')}"
