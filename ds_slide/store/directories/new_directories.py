"""Directories that a refused run has made on its way: a refusal leaves none of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def missing_directories(paths: Iterable[Path]) -> list[Path]:
    """What would have to be made for `paths` to be there, each above those in it."""
    missing: list[Path] = []
    for path in paths:
        absolute = Path(os.path.abspath(path.expanduser()))
        missing += [each for each in (*reversed(absolute.parents), absolute) if not os.path.lexists(each)]
    return list(dict.fromkeys(missing))


def remove_if_empty(directories: Iterable[Path]) -> None:
    """Remove `directories`, the innermost first, but for what others have put something into meanwhile."""
    for directory in reversed(list(directories)):
        with contextlib.suppress(OSError):
            directory.rmdir()
