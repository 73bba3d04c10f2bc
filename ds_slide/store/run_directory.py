"""A directory of this run alone under a parent that other runs and ranks share; nothing in it outlives the run.

    <parent>/ds_slide-<host>-<pid>-<rank>-<random>/lock        held by flock for the life of the run
    <parent>/ds_slide-<host>-<pid>-<rank>-<random>/...         whatever the run keeps there

The lock, not the pid, says whether a run is alive: the kernel drops it however the process ends, and it means the same
in every container that sees the directory and after a pid was used again. Who makes a run directory first removes those
whose lock it can get.

Making and removing race without a lock on the parent, because the order is fixed. A maker counts its directory as made
once it holds the lock of a file that is still in its place; a remover deletes only under the lock, and the lock file
last. A directory without a lock file is being made, or what a maker or remover left when it was killed: it is empty,
and rmdir takes nothing else; a maker that loses it so makes another.
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
import weakref
from pathlib import Path

from ds_slide.errors import SlideError

LOCK_NAME = "lock"
NAME = re.compile(r"ds_slide-.+-\d+-\d+-[0-9a-f]{12}")
# A maker loses its directory only to a remover that looked within the microseconds between mkdir and flock.
ATTEMPTS = 1000

_log = logging.getLogger("ds_slide")


class RunDirectory:
    """`path`: the directory, of mode 0700. Removed by `close`, else at interpreter exit, else by the next run's start.

    `json_path` is named in errors: the key of the JSON that says `parent`, which is made when it is missing.
    """

    def __init__(self, parent: Path, rank: int, *, json_path: str = "ds_slide.nvme_path") -> None:
        parent = Path(os.path.abspath(parent.expanduser()))
        host = re.sub(r"[^A-Za-z0-9_.]+", "_", socket.gethostname()) or "host"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_dead_runs(parent)
            self.path, lock = _make(parent, f"ds_slide-{host}-{os.getpid()}-{rank}")
        except OSError as error:
            raise SlideError(_reason(json_path, parent, error)) from error
        # Runs at exit too, and when the object is dropped. The pid is compared because a forked child that leaves by
        # sys.exit runs its parent's exit handlers.
        self._remove = weakref.finalize(self, _remove_own, self.path, lock, os.getpid())
        _locks.add(lock)

    def close(self) -> None:
        """Remove the directory with everything in it and let the lock go. A second call does nothing."""
        self._remove()

    def remove_now(self) -> None:
        """As `close`, also where another thread is in the middle of it: the process ends when this returns."""
        self._remove()
        while self.path.exists():
            try:
                _remove_contents(self.path)
            except FileNotFoundError:
                continue  # the other one was faster
            except OSError:
                return


def _reason(json_path: str, parent: Path, error: OSError) -> str:
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
    return f"{json_path}: no run directory can be made in {str(parent)!r} ({error.strerror}); {advice}"


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new directory and the descriptor that holds its lock."""
    for _ in range(ATTEMPTS):
        path = parent / f"{prefix}-{secrets.token_hex(6)}"
        os.mkdir(path, 0o700)
        try:
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # a remover took the directory while it was empty
        except OSError:
            _rmdir(path)
            raise
        try:
            if _locked(lock) and _is_in_place(path, lock):
                return path, lock
        except OSError:
            (path / LOCK_NAME).unlink(missing_ok=True)
            os.close(lock)
            _rmdir(path)
            raise
        os.close(lock)
    raise OSError(errno.EBUSY, f"{ATTEMPTS} new directories were removed by other processes")


def _locked(descriptor: int) -> bool:
    """Whether the lock could be had at once. OSError where the filesystem has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_in_place(path: Path, lock: int) -> bool:
    """Whether the locked file is still the one in the directory."""
    try:
        return os.path.samestat(os.stat(path / LOCK_NAME, follow_symlinks=False), os.fstat(lock))
    except FileNotFoundError:
        return False


def _remove_dead_runs(parent: Path) -> None:
    """Remove the directories of runs that no longer live. What belongs to others or is not ours stays."""
    with os.scandir(parent) as entries:
        candidates = [Path(e.path) for e in entries if NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    for path in candidates:
        try:
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            _rmdir(path)
            continue
        except OSError as error:  # another user's, most likely
            _log.info("the run directory %s was left alone: %s", path, error.strerror)
            continue
        try:
            if _locked(lock) and _is_in_place(path, lock):
                _remove_contents(path)
        except OSError as error:
            _log.warning("the directory %s of a dead run could not be removed (%s); remove it", path, error.strerror)
        finally:
            os.close(lock)


def _remove_contents(path: Path) -> None:
    """Remove the directory, whose lock the caller holds; the lock file last, so that a kill leaves a locked whole."""
    with os.scandir(path) as entries:
        found = list(entries)
    foreign = [e.name for e in found if not stat.S_ISREG(e.stat(follow_symlinks=False).st_mode)]
    if foreign:
        raise OSError(errno.ENOTEMPTY, f"it holds {foreign[0]!r}, which no run puts there")
    for entry in found:
        if entry.name != LOCK_NAME:
            Path(entry.path).unlink(missing_ok=True)
    (path / LOCK_NAME).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):  # from here on a starting run may take the empty directory first
        path.rmdir()


def _rmdir(path: Path) -> None:
    """Remove an empty directory; one that is gone, or has content by now, is another process's business."""
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.EPERM):
            raise


def _remove_own(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return
    try:
        _remove_contents(path)
    except FileNotFoundError:
        pass  # somebody was faster
    except OSError as error:
        _log.warning("the run directory %s could not be removed (%s); remove it", path, error.strerror)
    finally:
        _locks.discard(lock)
        os.close(lock)


# Descriptors of the locks that this process holds. A child shares the lock with its parent as long as it has the
# descriptor open, and would keep a killed parent's directory alive.
_locks: set[int] = set()


def _close_locks_in_child() -> None:
    for lock in _locks:
        os.close(lock)
    _locks.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)
