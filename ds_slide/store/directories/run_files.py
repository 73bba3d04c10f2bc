"""The files of a run in one directory that the user has named: without a name wherever the file system allows it.

A file without a name is gone with the last process that has it open, however that ends, and nobody else can reach it.
It is made so (O_TMPFILE), or made in a RunDirectory and unlinked at once. Where that leaves a name after all, as on NFS
(`.nfs...`) and some FUSE file systems (`.fuse_hidden...`), the file keeps its own name in the RunDirectory.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from ds_slide.store.directories.locked_directory import LOCK
from ds_slide.store.directories.owned_directory import opened, present_path, unnamed_file
from ds_slide.store.directories.run_directory import RunDirectory, cannot_be_used, remove_dead_runs
from ds_slide.store.directories.writable_by_others import warn_if_writable_by_others

_TRIAL = b"\xa5" * 4096

_log = logging.getLogger("ds_slide")


@dataclass(frozen=True)
class RunFile:
    """A new file, open for reading and writing as `descriptor`, which whoever asked for it closes.

    `label`: its path, or that under which `lsof +L1` and /proc show one without a name; for messages.
    """

    descriptor: int
    label: str


class RunFiles:
    """The files of this run below `parent`, which is made when it is missing; `path` is its absolute path.

    Dead runs' directories there are removed first. `json_path` is named in errors: the key of the JSON that says
    `parent`. Raises SlideError where no file can be made.
    """

    def __init__(self, parent: Path, rank: int, *, json_path: str = "ds_slide.nvme_path") -> None:
        self.path = Path(os.path.abspath(parent.expanduser()))
        self._json_path = json_path
        self._rank = rank
        self._directory: RunDirectory | None = None
        self._keeps_names = False
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with opened(self.path) as directory:
                warn_if_writable_by_others(directory, self.path, json_path)
                remove_dead_runs(directory, self.path)
        except OSError as error:
            raise cannot_be_used(json_path, self.path, error) from error

    def make(self, name: str) -> RunFile:
        """A new, empty file; `name`, one of run_directory.FILES, is the one it has where it needs one."""
        try:
            with opened(self.path) as parent:
                return self._make(name, parent)
        except OSError as error:
            raise cannot_be_used(self._json_path, self.path, error) from error

    def discard(self, file: RunFile) -> None:
        """Close a file that is needed no more, and remove its name where it has one."""
        os.close(file.descriptor)
        if self._directory is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.basename(file.label), dir_fd=self._directory.descriptor)

    def close(self) -> None:
        """Remove the files that have a name, of which the descriptors may still be open. A second call does nothing."""
        if self._directory is not None:
            self._directory.close()

    def _make(self, name: str, parent: int) -> RunFile:
        descriptor = unnamed_file(parent)
        if descriptor is not None:
            if _works_without_a_name(descriptor):
                return RunFile(descriptor, _label(descriptor, self.path / name))
            os.close(descriptor)
        if self._directory is None:
            self._directory = RunDirectory(parent, self.path, self._rank)
        directory = self._directory
        descriptor = _named_file(directory, name)
        if self._keeps_names:
            return RunFile(descriptor, str(directory.path / name))
        os.unlink(name, dir_fd=directory.descriptor)
        if _works_without_a_name(descriptor) and os.listdir(directory.descriptor) == [LOCK]:
            file = RunFile(descriptor, _label(descriptor, directory.path / name))
            directory.close()
            self._directory = None
            return file
        os.close(descriptor)  # with it goes what the file system has put in the place of the name
        self._keeps_names = True
        _log.info("%s: files keep their names in %s, where an open file cannot be unlinked", self._json_path, self.path)
        return RunFile(_named_file(directory, name), str(directory.path / name))


def _named_file(directory: RunDirectory, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600, dir_fd=directory.descriptor)


def _works_without_a_name(descriptor: int) -> bool:
    """Whether it has no name, and gives back what is written to it. It is empty afterwards."""
    try:
        if os.fstat(descriptor).st_nlink != 0 or os.pwrite(descriptor, _TRIAL, 0) != len(_TRIAL):
            return False
        found = os.pread(descriptor, len(_TRIAL), 0)
        os.ftruncate(descriptor, 0)
    except OSError:
        return False
    return found == _TRIAL


def _label(descriptor: int, otherwise: Path) -> str:
    return present_path(descriptor) or str(otherwise)
