"""A directory of this run alone under a parent that other runs and ranks share; nothing in it outlives the run.

    <parent>/ds_slide-<host>-<pid>-<rank>-<random>/lock        held by flock for the life of the run
    <parent>/ds_slide-<host>-<pid>-<rank>-<random>/<file>      one of FILES

The lock, not the pid, says whether a run is alive: the kernel drops it however the process ends, and it means the same
in every container that sees the directory and after a pid was used again. Who starts next to a dead run's directory
removes it.

Making and removing race without a lock on the parent, because the order is fixed. A maker counts its directory as made
once it holds the lock of a file that is still in its place; a remover deletes only under the lock, and the lock file
last. A directory without a lock file is being made, or what a maker or remover left when it was killed: it is empty,
and rmdir takes nothing else; a maker that loses it so makes another.

Others may be able to write to the parent, so that any name in it may become anything at any time. A directory is
therefore reached by its descriptor (owned_directory.py), also by its own run at the end: it is emptied wherever it is
by then. Only the files that a run makes are removed, and only from a directory that belongs to this user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import socket
import stat
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from ds_slide.errors import SlideError
from ds_slide.store.directories.owned_directory import (
    REMOVED,
    first_foreign,
    is_at,
    is_hidden,
    open_owned,
    owned,
    remove_empty,
    status_of,
)

LOCK_NAME = "lock"
FILES = ("bandwidth", "states")
"""What a run keeps in its directory beside the lock."""
NAME = re.compile(r"ds_slide-.+-\d+-\d+-[0-9a-f]{12}")
# A maker loses its directory only to a remover that looked within the microseconds between mkdir and flock.
ATTEMPTS = 1000
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)

_log = logging.getLogger("ds_slide")


class RunDirectory:
    """`path`: the directory as it was made, of mode 0700, in the one open as `parent`. Removed by `close`, else at
    interpreter exit, else by the next run's start. Raises OSError.

    `descriptor`: of the directory, for its files; only their names in FILES are removed.
    """

    def __init__(self, parent: int, parent_path: Path, rank: int) -> None:
        host = re.sub(r"[^A-Za-z0-9_.]+", "_", socket.gethostname()) or "host"
        made = _make(parent, parent_path, f"ds_slide-{host}-{os.getpid()}-{rank}")
        self.path = made.path
        self.descriptor = made.directory
        self._made = made
        # Runs at exit, and when the object is dropped.
        weakref.finalize(self, _remove_own, made)
        _held.add(made)

    def close(self) -> None:
        """Remove the directory with its files and let the lock go. A second call does nothing; one while another
        thread is in the middle of it returns when that has ended, for the process may end then."""
        _remove_own(self._made)


@dataclass(eq=False)
class _Made:
    """Descriptors of the directory, its parent and its lock. `owner`: the process that has made it, because a forked
    child that leaves by sys.exit runs its parent's exit handlers. `removing`: held while it is removed."""

    path: Path
    parent: int
    directory: int
    lock: int | None
    owner: int = field(default_factory=os.getpid)
    removing: threading.RLock = field(default_factory=threading.RLock)
    removed: bool = False

    def unlock(self) -> None:
        lock, self.lock = self.lock, None
        if lock is not None:
            os.close(lock)

    def let_go(self) -> None:
        """Close the descriptors, whose numbers may be those of other files from then on."""
        _held.discard(self)
        self.unlock()
        for descriptor in (self.directory, self.parent):
            os.close(descriptor)


def cannot_be_used(json_path: str, parent: Path, error: OSError) -> SlideError:
    """The sentence for a parent in which no file or directory of a run can be made."""
    if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF):
        advice = (
            "files cannot be locked there (flock), as on some network filesystems; name a directory on a local disk"
        )
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "free space (or inodes) there, or name a directory on another disk"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST):
        advice = "something that is not a directory is in the way; name a directory"
    else:
        advice = "name a directory on a local disk that this user may write to"
    return SlideError(f"{json_path}: no file can be made in {str(parent)!r} ({error.strerror}); {advice}")


def _make(parent: int, parent_path: Path, prefix: str) -> _Made:
    for _ in range(ATTEMPTS):
        name = f"{prefix}-{secrets.token_hex(6)}"
        os.mkdir(name, 0o700, dir_fd=parent)
        try:
            directory = open_owned(name, parent)
        except OSError as error:
            if error.errno in REMOVED:
                continue  # a remover took the directory while it was empty
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=parent)
            raise
        lock = None
        try:
            if os.listdir(directory):
                raise OSError(errno.EEXIST, "another user has put another directory in the place of a new one", name)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(LOCK_NAME, flags, 0o600, dir_fd=directory)
            if _locked(lock) and is_at(LOCK_NAME, directory, lock):
                return _Made(parent_path / name, os.dup(parent), directory, lock)
        except OSError as error:
            if error.errno not in REMOVED:
                if lock is not None:
                    os.unlink(LOCK_NAME, dir_fd=directory)
                    os.close(lock)
                _remove_if_empty(name, parent, directory)
                os.close(directory)
                raise
        if lock is not None:
            os.close(lock)
        os.close(directory)
    raise OSError(errno.EBUSY, f"{ATTEMPTS} new directories were removed by other processes")


def _locked(descriptor: int) -> bool:
    """Whether the lock could be had at once. OSError where the filesystem has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_dead_runs(parent: int, parent_path: Path) -> None:
    """Remove this user's directories of runs that no longer live. What belongs to others or is not ours stays."""
    for name in os.listdir(parent):
        if not NAME.fullmatch(name):
            continue
        try:
            with owned(name, parent) as directory:
                _remove_dead(name, parent, directory)
        except FileNotFoundError:
            continue  # another start was faster
        except OSError as error:
            _log.info("the run directory %s was left alone: %s", parent_path / name, error.strerror)


def _remove_dead(name: str, parent: int, directory: int) -> None:
    found = status_of(LOCK_NAME, directory)
    if found is None:
        _remove_if_empty(name, parent, directory)
        return
    if not stat.S_ISREG(found.st_mode):  # a FIFO would block, a device might do anything
        raise OSError(errno.EINVAL, "its lock is no file")
    lock = os.open(LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    try:
        try:
            if _locked(lock) and is_at(LOCK_NAME, directory, lock):
                _remove_files(directory)
        finally:
            os.close(lock)  # before the directory: NFS and FUSE keep the open file in it
        # Also one whose run has ended meanwhile, and could not remove it for the lock that was open here.
        _remove_if_empty(name, parent, directory)
    except OSError as error:
        _log.warning("the directory %s of a dead run could not be removed (%s); remove it", name, error.strerror)


def _remove_files(directory: int) -> None:
    """Remove what a run has made, whose lock the caller holds; the lock file last, so that a kill leaves a locked
    whole. Raises OSError, with nothing removed, where there is anything else."""
    foreign = first_foreign(directory, lambda name, below, _level: not below and name in (*FILES, LOCK_NAME))
    if foreign is not None:
        raise OSError(errno.ENOTEMPTY, f"it holds {foreign!r}, which no run puts there")
    hidden = filter(is_hidden, os.listdir(directory))
    for name in (*hidden, *FILES, LOCK_NAME):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)


def _remove_if_empty(name: str, parent: int, directory: int) -> None:
    """One that has content by now is another process's business."""
    try:
        remove_empty(name, parent, directory)
    except OSError as error:
        if error.errno not in (*_NOT_EMPTY, errno.EACCES, errno.EPERM, errno.EBUSY):
            raise


def _remove_own(made: _Made) -> None:
    if os.getpid() != made.owner:
        return
    with made.removing:
        if made.removed:
            return
        made.removed = True
        try:
            _remove_files(made.directory)
            made.unlock()  # before the directory: NFS and FUSE keep the open file in it
            if not remove_empty(made.path.name, made.parent, made.directory):
                _log.warning("somebody has renamed the run directory %s; an empty directory is left", made.path)
        except OSError as error:
            if error.errno not in _NOT_EMPTY or not _holds_open_files_only(made.directory):
                _log.warning("the run directory %s could not be removed (%s); remove it", made.path, error.strerror)
        finally:
            made.let_go()


def _holds_open_files_only(directory: int) -> bool:
    """Whether nothing is in it but what is still open somewhere. A start that looks for dead runs has the lock open for
    a moment and removes the directory then; of what this process has open the next start removes it."""
    try:
        return all(map(is_hidden, os.listdir(directory)))
    except OSError as error:
        return error.errno in REMOVED


# The directories that this process has. A child shares a lock with its parent as long as it has the descriptor open,
# and would keep a killed parent's directory alive.
_held: set[_Made] = set()


def _close_in_child() -> None:
    for made in list(_held):
        made.let_go()


os.register_at_fork(after_in_child=_close_in_child)
