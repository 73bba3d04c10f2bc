"""The directory in which a checkpoint is written, and the rename that makes it current.

    save_dir/.ds_slide_saving.<id>/    locked (flock) by the process that publishes, for as long as it lives
        lock
        <tag>/                         the files, then their manifest
        zero_to_fp32.py, latest        what goes beside the tag

What a kill -9 leaves, instant by instant. Before the rename: the old tag and `latest` as they were, and a directory
whose lock is free, which the next save into save_dir removes. The rename is one system call; a tag that exists is
exchanged with the new one, never absent. After it: the new tag is whole (files, manifest and directories were synced
before), `latest` names the old tag or, after a second rename, the new one; either loads. Only where the file system
cannot exchange (NFS, some overlays) is the old tag first renamed to `.ds_slide_replaced.<tag>`; killed between the two
renames, the next load or save renames it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import shutil
import urllib.parse
import uuid
from collections.abc import Mapping
from pathlib import Path

from ds_slide.errors import SlideError
from ds_slide.integration.checkpoint_manifest import fsync_directory, manifest_now, write_durably
from ds_slide.integration.checkpoint_sums import Sum

logger = logging.getLogger(__name__)

SAVING, _REPLACED = ".ds_slide_saving.", ".ds_slide_replaced."
_LOCK = "lock"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def checked_tag(tag: str) -> str:
    """`tag` when it names a directory below save_dir. Raises SlideError."""
    parts = tag.split("/")
    if any(part in ("", ".", "..") or part.startswith((SAVING, _REPLACED)) for part in parts) or "\0" in tag:
        raise SlideError(f"the checkpoint tag {tag!r} does not name a directory below save_dir; use another tag")
    return tag


def new_name() -> str:
    """A name for the directory of one save, the same for all its ranks."""
    return SAVING + uuid.uuid4().hex[:16]


def reached(_phase: str) -> None:
    """The save has come to `_phase`. Does nothing; tests kill the process here."""


class Staging:
    """`save_dir`/`name` of the publishing process: from `open` until `discard`."""

    def __init__(self, save_dir: Path, name: str) -> None:
        self.save_dir = save_dir
        self.path = save_dir / name
        self._lock: int | None = None

    def open(self, tag: str) -> None:
        """Remove what dead saves have left, then make and lock the directory and that of the tag. Raises OSError."""
        self.save_dir.mkdir(parents=True, exist_ok=True)
        recover(self.save_dir)
        _remove_stale(self.save_dir)
        self.path.mkdir()
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        if _try_lock(self._lock) is False or os.fstat(self._lock).st_nlink == 0:
            # Another save began to remove stale directories when this one had no lock yet.
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(self.path))
        (self.path / tag).mkdir(parents=True)

    def free_bytes(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def publish(self, tag: str, files: Mapping[str, Sum], *, latest: bool) -> None:
        """Complete the tag with the manifest of its `files` and make it current, then the scripts in this directory
        and, if asked for, `latest`. Raises OSError, and SlideError where a file is not as it was written."""
        new, target = self.path / tag, self.save_dir / tag
        manifest = manifest_now(files)
        manifest.check(new, lambda _name: False)
        manifest.write(new)
        scripts = [path.name for path in self.path.glob("*.py")]
        fsync_directory(new)
        target.parent.mkdir(parents=True, exist_ok=True)
        reached("before the rename")
        if os.path.lexists(target):
            _replace(self.save_dir, tag, new)
        else:
            os.rename(new, target)
        fsync_directory(target.parent)
        fsync_directory(self.save_dir)
        reached("renamed")
        for script in scripts:
            os.replace(self.path / script, self.save_dir / script)
        if latest:
            write_durably(self.path / "latest", tag.encode())
            reached("before latest")
            os.replace(self.path / "latest", self.save_dir / "latest")
        fsync_directory(self.save_dir)
        reached("published")

    def remove(self) -> None:
        """Remove the directory with what is left in it, as any rank may that has published: the checkpoint is there,
        so what cannot be removed is left, with a warning, to the next save."""
        try:
            self._rename_away()
            _remove(self._ended)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                logger.warning("%s cannot be removed (%s); the next save tries again", self._ended, error)

    def discard(self) -> None:
        """Remove the directory with what is left in it: a failed save, or the checkpoint that was replaced. Raises
        OSError."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        try:
            self._rename_away()
        finally:
            os.close(lock)  # before the file goes: NFS keeps an open one, and with it the directory
        with contextlib.suppress(FileNotFoundError):
            _remove(self._ended)

    @property
    def _ended(self) -> Path:
        return self.path.with_name(f"{self.path.name}.ended")

    def _rename_away(self) -> None:
        """First, and at once: no other rank finds a part of it, to publish that or to publish it again."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, self._ended)


def recover(save_dir: Path) -> None:
    """Rename back what a save had renamed away when it was killed. Raises OSError."""
    for replaced in save_dir.glob(f"{_REPLACED}*"):
        target = save_dir / urllib.parse.unquote(replaced.name.removeprefix(_REPLACED))
        if not os.path.lexists(target):
            logger.warning("a save was killed while it replaced %s; the old checkpoint is there again", target)
            os.rename(replaced, target)


def _replace(save_dir: Path, tag: str, new: Path) -> None:
    """Put the directory `new` in the place of the tag; the old one ends in the place of `new`."""
    target = save_dir / tag
    if _exchange(new, target):
        return
    replaced = save_dir / (_REPLACED + urllib.parse.quote(tag, safe=""))
    os.rename(target, replaced)
    fsync_directory(save_dir)
    reached("renamed away")
    os.rename(new, target)
    os.rename(replaced, new)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one system call; False where that cannot be done."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def _remove_stale(save_dir: Path) -> None:
    for path in save_dir.glob(f"{SAVING}*"):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            with contextlib.suppress(OSError):  # another save has just made it: not for long empty
                path.rmdir()
            continue
        try:
            if _try_lock(lock):
                logger.warning("removing %s, which a save that was killed has left", path)
                _remove(path)
        finally:
            os.close(lock)
    for path in save_dir.glob(f"{_REPLACED}*"):  # its tag is there: `recover` has run
        shutil.rmtree(path)


def _try_lock(descriptor: int) -> bool | None:
    """False when another process has the lock, None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (*_NO_LOCKS, errno.EWOULDBLOCK):
            return False if error.errno == errno.EWOULDBLOCK else None
        raise
    return True


def _remove(path: Path) -> None:
    """The lock goes last, so that whatever is left after a kill can still be recognised as dead."""
    for child in path.iterdir():
        if child.name == _LOCK:
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()
    (path / _LOCK).unlink(missing_ok=True)
    path.rmdir()
