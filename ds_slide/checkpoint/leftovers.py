"""What saves that were killed have left in a checkpoint directory: found, put back, removed.

The directory may be writable by others, or come from somewhere else as a whole, so nothing in it is believed: a name
counts only when it is one that a save makes, a directory only when it is ours (`owned_directory`), its content only
when a save has written all of it. The rest stays as it is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path

from ds_slide.checkpoint.manifest import NAME as MANIFEST
from ds_slide.errors import SlideError
from ds_slide.store.directories.owned_directory import (
    Known,
    first_foreign,
    is_at,
    open_below,
    opened,
    owned,
    remove_contents,
    remove_empty,
    status_of,
)

logger = logging.getLogger(__name__)

SAVING, REPLACED = ".ds_slide_saving.", ".ds_slide_replaced."
LOCK = "lock"
_ENDED = ".ended"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# The last two: another process has a file of it open, which NFS keeps as long under another name.
_LEFT_ALONE = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ESTALE, errno.EBUSY, errno.ENOTEMPTY, errno.EEXIST)
_NOT_PUT_BACK = (errno.EPERM, errno.EACCES, errno.EROFS)
# DeepSpeed's files end so, at whatever depth (universal ones), and those of the ranks that agree on a save.
_FILE_OF_TAG = re.compile(rf"[\w.-]+\.pt|{re.escape(MANIFEST)}")
_FILE_BESIDE_TAG = re.compile(rf"{LOCK}|latest|\w+\.py|{re.escape(SAVING)}(publishing|rank\d+\.(json|new))")


def checked_tag(tag: str) -> str:
    """`tag` when it names a directory below save_dir. Raises SlideError."""
    parts = tag.split("/")
    if any(part in ("", ".", "..") or part.startswith((SAVING, REPLACED)) for part in parts) or "\0" in tag:
        raise SlideError(f"the checkpoint tag {tag!r} does not name a directory below save_dir; use another tag")
    return tag


def replaced_name(tag: str) -> str:
    """Where the old checkpoint of the tag waits while it is replaced by two renames."""
    return REPLACED + urllib.parse.quote(tag, safe="")


def replaced_tag(name: str) -> str | None:
    """The tag whose `replaced_name` this is, None for every other name."""
    if not name.startswith(REPLACED):
        return None
    try:
        tag = checked_tag(urllib.parse.unquote(name.removeprefix(REPLACED)))
        return tag if replaced_name(tag) == name else None
    except (SlideError, UnicodeEncodeError):
        return None


def recover(save_dir: Path) -> None:
    """Rename back what a save had renamed away when it was killed. Raises OSError."""
    with opened(save_dir) as parent:
        for name in sorted(os.listdir(parent)):
            tag = replaced_tag(name)
            if tag is not None:
                _put_back(save_dir, parent, name, tag)


def _put_back(save_dir: Path, parent: int, name: str, tag: str) -> None:
    *above, last = tag.split("/")
    try:
        target = open_below(above, parent)
    except OSError as error:
        logger.warning("%s was left alone: %s (%s)", save_dir / name, tag, error.strerror)
        return
    try:
        with _leaving_alone(save_dir / name, _NOT_PUT_BACK):
            if status_of(last, target) is not None:
                return
            with owned(name, parent):
                os.rename(name, last, src_dir_fd=parent, dst_dir_fd=target)
            logger.warning("a save was killed while it replaced %s; the old checkpoint is there again", save_dir / tag)
    finally:
        os.close(target)


def remove_dead(save_dir: Path, parent: int) -> None:
    """Remove what dead saves have left in `save_dir`, open as `parent`, `recover` having run. Raises OSError."""
    for name in sorted(os.listdir(parent)):
        with _leaving_alone(save_dir / name, _LEFT_ALONE):
            if name.startswith(SAVING):
                with owned(name, parent) as directory:
                    _remove_dead_save(save_dir / name, parent, directory)
            elif (tag := replaced_tag(name)) is not None and _is_there(tag, parent):
                with owned(name, parent) as directory:
                    _require_saved(directory, _is_of_tag)
                    remove_directory(name, parent, directory)


@contextlib.contextmanager
def _leaving_alone(path: Path, errnos: Sequence[int]) -> Iterator[None]:
    """An entry that another process has taken meanwhile is no error, nor one that `errnos` keep from us: a line of the
    log says so."""
    try:
        yield
    except FileNotFoundError:
        return  # another process was faster
    except OSError as error:
        if error.errno not in errnos:
            raise
        logger.warning("%s was left alone: %s", path, error.strerror)


def _is_there(tag: str, parent: int) -> bool:
    *above, last = tag.split("/")
    try:
        directory = open_below(above, parent)
    except OSError:
        return False
    try:
        return status_of(last, directory) is not None
    finally:
        os.close(directory)


def _remove_dead_save(path: Path, parent: int, directory: int) -> None:
    found = status_of(LOCK, directory)
    if found is None:
        with contextlib.suppress(OSError):  # another save has just made it: not for long empty
            remove_empty(path.name, parent, directory)
        return
    if not stat.S_ISREG(found.st_mode):  # a FIFO would block, a device might do anything
        raise OSError(errno.EINVAL, f"its {LOCK} is no file")
    lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        if not (try_lock(lock) and is_at(LOCK, directory, lock)):
            return
        _require_saved(directory, _is_of_save)
        logger.warning("removing %s, which a save that was killed has left", path)
        rename_away(path.name, parent, directory)
    finally:
        os.close(lock)  # before the file goes: NFS keeps an open one, and with it the directory
    remove_directory(ended_name(path.name), parent, directory)


def ended_name(name: str) -> str:
    """Of the directory of a save that has ended, which nobody writes or publishes any more."""
    return name if name.endswith(_ENDED) else name + _ENDED


def rename_away(name: str, parent: int, directory: int) -> None:
    """Give the directory open as `directory` its `ended_name`, before a part of it is removed: no rank of the save
    finds the rest, to publish that or to publish it again. Raises OSError."""
    if ended_name(name) != name and is_at(name, parent, directory):
        with contextlib.suppress(FileNotFoundError):
            os.rename(name, ended_name(name), src_dir_fd=parent, dst_dir_fd=parent)


def try_lock(descriptor: int) -> bool | None:
    """False when another process has the lock, None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (*_NO_LOCKS, errno.EWOULDBLOCK):
            return False if error.errno == errno.EWOULDBLOCK else None
        raise
    return True


def remove_directory(name: str, parent: int, directory: int) -> None:
    """Remove the directory open as `directory` with all that is in it; the lock goes last, so that whatever is left
    after a kill can still be recognised as dead. Raises OSError, also where a part of it is not ours."""
    remove_contents(directory, last=LOCK)
    if not remove_empty(name, parent, directory):
        raise OSError(errno.ESTALE, "somebody has renamed it; an empty directory is left", name)


def _require_saved(directory: int, is_of_save: Known) -> None:
    foreign = first_foreign(directory, is_of_save)
    if foreign is not None:
        raise OSError(errno.EINVAL, f"it holds {foreign!r}, which no save puts there")


def _is_of_tag(name: str, is_directory: bool, _level: int) -> bool:
    return name.isprintable() if is_directory else _FILE_OF_TAG.fullmatch(name) is not None


def _is_of_save(name: str, is_directory: bool, level: int) -> bool:
    if level == 0 and not is_directory:
        return _FILE_BESIDE_TAG.fullmatch(name) is not None
    return _is_of_tag(name, is_directory, level)
