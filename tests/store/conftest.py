"""Filesystems of a kind that an ordinary directory is not: read-only, full, small."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`mounted("size=1m")` is a new tmpfs with these options; skips where this user may not mount."""
    made: list[Path] = []

    def mount(options: str) -> Path:
        where = tmp_path / f"mount{len(made)}"
        where.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)], capture_output=True, text=True
        )
        if done.returncode != 0:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        made.append(where)
        return where

    yield mount
    for where in made:
        subprocess.run(["umount", "-l", str(where)], check=True)
