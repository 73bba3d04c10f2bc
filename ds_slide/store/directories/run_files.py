"""The nameless files of a run, and the directories that are made for them.

A nameless file is gone with the last process that has it open, also after a kill, and no other process can reach it. It
is made without a name (O_TMPFILE). On a file system without such files (NFS, FUSE, older overlays) a named file is
unlinked as soon as it is open. NFS and FUSE keep an unlinked file under another name until it is closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ds_slide.errors import SlideError
from ds_slide.store.directories.owned_directory import opened, present_path, unnamed_file, warn_if_writable_by_others


@dataclass(frozen=True)
class RunFile:
    """A new file, open for reading and writing as `descriptor`; the caller of `make` closes it.

    `label`: the path that `lsof +L1` and /proc show, for messages.
    """

    descriptor: int
    label: str


class RunFiles:
    """The files of this run below `parent`, which is made when it is missing. `path` is its absolute path.

    `json_path`: the JSON key that sets `parent`, for errors. Raises SlideError where no file can be made.
    """

    def __init__(self, parent: Path, *, json_path: str = "ds_slide.nvme_path") -> None:
        self.path = Path(os.path.abspath(parent.expanduser()))
        self.json_path = json_path
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with opened(self.path) as directory:
                warn_if_writable_by_others(directory, self.path, json_path)
        except OSError as error:
            raise self._cannot_be_used(error) from error

    def make(self, name: str) -> RunFile:
        """Make an empty file. `name` stands in messages where the system tells no path."""
        try:
            with opened(self.path) as parent:
                descriptor = unnamed_file(parent)
                if descriptor is None:
                    descriptor = _unlinked_file(parent)
            return RunFile(descriptor, present_path(descriptor) or str(self.path / name))
        except OSError as error:
            raise self._cannot_be_used(error) from error

    def _cannot_be_used(self, error: OSError) -> SlideError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free space (or inodes) there, or name a directory on another disk"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            advice = "something that is not a directory is in the way; name a directory"
        else:
            advice = "name a directory on a local disk that this user may write to"
        return SlideError(f"{self.json_path}: no file can be made in {str(self.path)!r} ({error.strerror}); {advice}")


def _unlinked_file(parent: int) -> int:
    """Make and unlink a file in the directory open as `parent`. Raises OSError, also where the unlinked file does not
    return what was written to it."""
    name, trial = f".ds_slide-{secrets.token_hex(6)}", b"\xa5" * 4096
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=parent)
    try:
        os.unlink(name, dir_fd=parent)
        if os.pwrite(descriptor, trial, 0) != len(trial) or os.pread(descriptor, len(trial), 0) != trial:
            raise OSError(errno.EIO, "an open file cannot be unlinked there")
        os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def missing_directories(paths: Iterable[Path]) -> list[Path]:
    """Return the directories that are missing for `paths`, outer directories first."""
    missing: list[Path] = []
    for path in paths:
        absolute = Path(os.path.abspath(path.expanduser()))
        missing += [each for each in (*reversed(absolute.parents), absolute) if not os.path.lexists(each)]
    return list(dict.fromkeys(missing))


def remove_if_empty(directories: Iterable[Path]) -> None:
    """Remove the empty ones of `directories`, which a refused run has made, the innermost first."""
    for directory in reversed(list(directories)):
        with contextlib.suppress(OSError):
            directory.rmdir()
