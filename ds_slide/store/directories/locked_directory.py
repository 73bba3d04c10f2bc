"""A directory of one owner, a save, under a shared parent. It is removed when the owner ends or is dead.

    <parent>/<name>/lock      held by flock for the life of the owner
    <parent>/<name>/...       what the owner puts there

The lock, not the pid, tells whether an owner is alive. The kernel drops the lock at any end of the process. A lock
means the same in every container that sees the directory, and pids are used again.

Makers and removers need no lock on the parent, because the order of steps is fixed. A maker counts its directory as
made once it holds the lock of a file that is still in its place and empty. A remover deletes only what it has locked.
It makes the lock file a byte long before it drops the lock, and deletes that file last. A directory without a lock file
is being made, or was left by a killed maker or remover. It is empty, and rmdir removes only an empty directory.

Other users may be able to write to the parent and change any name at any time. So a directory is reached by its
descriptor (owned_directory.py), also by its owner at the end, and is emptied under any name. Only the entries that an
owner makes are removed, and only from a directory that belongs to this user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ds_slide.store.directories.owned_directory import (
    REMOVED,
    Content,
    first_foreign,
    is_at,
    open_owned,
    owned,
    remove_contents,
    remove_empty,
    status_of,
)

LOCK = "lock"
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)


Prepare = Callable[[Path, int, int], str]
"""Called under the lock before a directory is emptied, with its path and the descriptors of its parent and itself.
Raises OSError where the directory must stay. Returns the name that the directory has from then on."""


@dataclass(eq=False)
class LockedDirectory:
    """A new directory `path` of this process, locked until it is removed. Holds descriptors of it, parent and lock.

    `owner`: the process that has made it, because a forked child that ends by sys.exit runs its parent's exit
    handlers. `removing`: held during the removal.
    """

    path: Path
    parent: int
    directory: int
    lock: int | None
    owner: int = field(default_factory=os.getpid)
    removing: threading.RLock = field(default_factory=threading.RLock)
    removed: bool = False

    def remove(self, prepare: Prepare) -> None:
        """Remove the directory and its content, under its present name. A second call does nothing. A call during a
        removal by another thread waits for its end, because the process may end next. Raises OSError."""
        if os.getpid() != self.owner:
            return
        with self.removing:
            if self.removed:
                return
            self.removed = True
            try:
                name = prepare(self.path, self.parent, self.directory)
                self._unlock()  # before the file goes: NFS and FUSE keep an open one, and with it the directory
                remove_unlocked(name, self.parent, self.directory)
            finally:
                self.let_go()

    def let_go(self) -> None:
        """Close the descriptors. Other files may get their numbers from then on."""
        _held.discard(self)
        self._unlock()
        for descriptor in (self.directory, self.parent):
            os.close(descriptor)

    def _unlock(self) -> None:
        lock, self.lock = self.lock, None
        if lock is not None:
            os.close(lock)


def make_locked(path: Path, parent: int, mode: int, *, without_locks: bool = False) -> LockedDirectory | None:
    """Make `path` in the directory open as `parent`, and lock it. None where a remover took it before the lock.

    `without_locks`: make it also on a file system without locks, where no process can find it dead. Raises OSError, and
    leaves nothing then.
    """
    name = path.name
    os.mkdir(name, mode, dir_fd=parent)
    try:
        directory = open_owned(name, parent)
    except OSError as error:
        if error.errno in REMOVED:
            return None  # a remover took the directory while it was empty
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=parent)
        raise
    lock = None
    try:
        if os.listdir(directory):
            raise OSError(errno.EEXIST, "another user has put another directory in the place of a new one", name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(LOCK, flags, mode & 0o666, dir_fd=directory)
        locked = _try_lock(lock)
        if locked is None and not without_locks:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), name)
        if locked is not False and is_at(LOCK, directory, lock) and not os.fstat(lock).st_size:
            made = LockedDirectory(path, os.dup(parent), directory, lock)
            _held.add(made)
            return made
    except OSError as error:
        if error.errno not in REMOVED:
            if lock is not None:
                os.unlink(LOCK, dir_fd=directory)
                os.close(lock)
            _remove_if_empty(name, parent, directory)
            os.close(directory)
            raise
    if lock is not None:
        os.close(lock)
    os.close(directory)
    return None


def remove_dead(path: Path, parent: int, prepare: Prepare) -> None:
    """Remove the directory `path` in the directory open as `parent`. It stays where its owner lives or the file system
    has no locks. Raises OSError, also where it is not ours. FileNotFoundError: another process was faster."""
    with owned(path.name, parent) as directory:
        found = status_of(LOCK, directory)
        if found is None:
            _remove_if_empty(path.name, parent, directory)
            return
        if not stat.S_ISREG(found.st_mode):  # a FIFO would block, a device might do anything
            raise OSError(errno.EINVAL, f"its {LOCK} is no file")
        lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        try:
            is_dead = _try_lock(lock) and is_at(LOCK, directory, lock)
            name = path.name
            if is_dead:
                name = prepare(path, parent, directory)
                # Its maker may have been about to lock it, and would find the file still there until it is deleted.
                os.ftruncate(lock, 1)
        finally:
            os.close(lock)  # before the file goes: NFS and FUSE keep an open one, and with it the directory
        if is_dead:
            remove_unlocked(name, parent, directory)
        else:  # its owner may have ended meanwhile, and could not remove it for the lock that was open here
            _remove_if_empty(name, parent, directory)


def require_content(directory: int, content: Content) -> None:
    """Raise OSError where the directory holds something that the owner of `content` does not put there."""
    foreign = first_foreign(directory, content)
    if foreign is not None:
        raise OSError(errno.ENOTEMPTY, f"it holds {foreign!r}, which no {content.owner} puts there")


def remove_unlocked(name: str, parent: int, directory: int) -> None:
    """Remove the directory open as `directory` with its content. The lock goes last, so that the rest after a kill is
    still recognised as dead. Raises OSError, also where a part is not ours."""
    remove_contents(directory, last=LOCK)
    if not remove_empty(name, parent, directory):
        raise OSError(errno.ESTALE, "somebody has renamed it; an empty directory is left", name)


def _try_lock(descriptor: int) -> bool | None:
    """Try to take the lock without waiting. Returns None where the file system has no locks. Raises OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return None
        raise
    return True


def _remove_if_empty(name: str, parent: int, directory: int) -> None:
    """Remove the directory if it is empty. If it has content, it belongs to another process."""
    try:
        remove_empty(name, parent, directory)
    except OSError as error:
        if error.errno not in (*_NOT_EMPTY, errno.EACCES, errno.EPERM, errno.EBUSY):
            raise


# The locked directories of this process. A forked child shares the lock while it has the descriptor open, and would
# keep a killed parent's directory alive.
_held: set[LockedDirectory] = set()


def _close_in_child() -> None:
    for made in list(_held):
        made.let_go()


os.register_at_fork(after_in_child=_close_in_child)
