"""An owner of locked directories, for tests of what saves use: it makes one under a parent, and removes dead ones."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import socket
import weakref
from pathlib import Path

from ds_slide.store.directories.locked_directory import (
    LOCK,
    LockedDirectory,
    make_locked,
    remove_dead,
    require_content,
)
from ds_slide.store.directories.owned_directory import Content

FILES = re.compile(rf"states|{LOCK}")
"""Names of what an owner keeps in its directory."""
NAME = re.compile(r"ds_slide-.+-\d+-\d+-[0-9a-f]{12}")
# A maker loses its directory only to a remover that looked within the microseconds between mkdir and flock.
_ATTEMPTS = 1000

_log = logging.getLogger("ds_slide")


class RunDirectory:
    """The directory of this run. `path`: as it was made, of mode 0700, in the one open as `parent`. It is removed by
    `close`, else at interpreter exit, else by the next run's start. Raises OSError.

    `descriptor`: of the directory, for its files; it is removed only while it holds nothing but FILES.
    """

    def __init__(self, parent: int, parent_path: Path, rank: int) -> None:
        host = re.sub(r"[^A-Za-z0-9_.]+", "_", socket.gethostname()) or "host"
        self._made = made = _make(parent, parent_path, f"ds_slide-{host}-{os.getpid()}-{rank}")
        self.path, self.descriptor = made.path, made.directory
        # Runs at exit, and when the object is dropped.
        weakref.finalize(self, _remove_own, made)

    def close(self) -> None:
        """Remove the directory with its files and let the lock go, as `LockedDirectory.remove` does."""
        _remove_own(self._made)


def _make(parent: int, parent_path: Path, prefix: str) -> LockedDirectory:
    for _ in range(_ATTEMPTS):
        made = make_locked(parent_path / f"{prefix}-{secrets.token_hex(6)}", parent, 0o700)
        if made is not None:
            return made
    raise OSError(errno.EBUSY, f"{_ATTEMPTS} new directories were removed by other processes")


def remove_dead_runs(parent: int, parent_path: Path) -> None:
    """Remove this user's directories of runs that no longer live. What belongs to others or is not ours stays."""
    for name in filter(NAME.fullmatch, os.listdir(parent)):
        try:
            remove_dead(parent_path / name, parent, _check)
        except FileNotFoundError:
            continue  # another start was faster
        except OSError as error:
            # Other users' directories are no concern of this one.
            level = logging.INFO if error.errno == errno.EPERM else logging.WARNING
            _log.log(level, "the run directory %s was left alone: %s", parent_path / name, error.strerror)


def _check(path: Path, _parent: int, directory: int) -> str:
    require_content(directory, Content("run", FILES))
    return path.name


def _remove_own(made: LockedDirectory) -> None:
    try:
        made.remove(_check)
    except OSError as error:
        _log.warning("the run directory %s could not be removed (%s); remove it", made.path, error.strerror)
