"""Leftovers of killed saves in a checkpoint directory: they are found, and put back or removed.

Other users may be able to write to the directory, or it may come from another machine, so its content is not trusted.
An entry counts only if a save makes such a name, the directory is ours (`owned_directory`), and a save could have
written all of its content. Other entries stay as they are.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path

from ds_slide.checkpoint.manifest import NAME as MANIFEST
from ds_slide.errors import SlideError
from ds_slide.store.directories.locked_directory import LOCK, remove_dead, remove_unlocked, require_content
from ds_slide.store.directories.owned_directory import Content, below, is_at, opened, owned, status_of

logger = logging.getLogger(__name__)

SAVING, REPLACED = ".ds_slide_saving.", ".ds_slide_replaced."
_ENDED = ".ended"
# The last two come when another process has a file of it open, which NFS then keeps under another name.
_LEFT_ALONE = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ESTALE, errno.EBUSY, errno.ENOTEMPTY, errno.EEXIST)
_NOT_PUT_BACK = (errno.EPERM, errno.EACCES, errno.EROFS)
# The names of DeepSpeed's files at any depth (universal checkpoints have levels), and our own.
_FILE_OF_TAG = re.compile(rf"[\w.-]+\.pt|{re.escape(MANIFEST)}")
_FILE_BESIDE_TAG = re.compile(rf"{LOCK}|latest|\w+\.py|{re.escape(SAVING)}(publishing|rank\d+\.(json|new))")
_TAG, _SAVE = Content("save", _FILE_OF_TAG, _FILE_OF_TAG), Content("save", _FILE_BESIDE_TAG, _FILE_OF_TAG)


def checked_tag(tag: str) -> str:
    """Return `tag` if it names a directory below save_dir. Raises SlideError otherwise."""
    parts = tag.split("/")
    if any(part in ("", ".", "..") or part.startswith((SAVING, REPLACED)) for part in parts) or "\0" in tag:
        raise SlideError(f"the checkpoint tag {tag!r} does not name a directory below save_dir; use another tag")
    return tag


def replaced_name(tag: str) -> str:
    """Return the name of the old checkpoint of the tag between the two renames that replace it."""
    return REPLACED + urllib.parse.quote(tag, safe="")


def replaced_tag(name: str) -> str | None:
    """Return the tag that has this `replaced_name`, None for other names."""
    if not name.startswith(REPLACED):
        return None
    try:
        tag = checked_tag(urllib.parse.unquote(name.removeprefix(REPLACED)))
        return tag if replaced_name(tag) == name else None
    except (SlideError, UnicodeEncodeError):
        return None


def recover(save_dir: Path) -> None:
    """Rename old checkpoints back that a killed save had renamed away. Raises OSError."""
    with opened(save_dir) as parent:
        for name in sorted(os.listdir(parent)):
            tag = replaced_tag(name)
            if tag is not None:
                _put_back(save_dir, parent, name, tag)


def _put_back(save_dir: Path, parent: int, name: str, tag: str) -> None:
    *above, last = tag.split("/")
    with contextlib.ExitStack() as stack:
        try:
            target = stack.enter_context(below(above, parent))
        except OSError as error:
            logger.warning("%s was left alone: %s (%s)", save_dir / name, tag, error.strerror)
            return
        with _leaving_alone(save_dir / name, _NOT_PUT_BACK):
            if status_of(last, target) is not None:
                return
            with owned(name, parent):
                os.rename(name, last, src_dir_fd=parent, dst_dir_fd=target)
            logger.warning("a save was killed while it replaced %s; the old checkpoint is there again", save_dir / tag)


def remove_dead_saves(save_dir: Path, parent: int) -> None:
    """Remove leftovers of dead saves in `save_dir`, open as `parent`. `recover` has run before. Raises OSError."""
    for name in sorted(os.listdir(parent)):
        with _leaving_alone(save_dir / name, _LEFT_ALONE):
            if name.startswith(SAVING):
                remove_dead(save_dir / name, parent, _end_dead_save)
            elif (tag := replaced_tag(name)) is not None and _is_there(tag, parent):
                with owned(name, parent) as directory:
                    require_content(directory, _TAG)
                    remove_unlocked(name, parent, directory)


@contextlib.contextmanager
def _leaving_alone(path: Path, errnos: Sequence[int]) -> Iterator[None]:
    """Ignore an entry that another process has taken, and log an entry that fails with one of `errnos`."""
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
        with below(above, parent) as directory:
            return status_of(last, directory) is not None
    except OSError:
        return False


def _end_dead_save(path: Path, parent: int, directory: int) -> str:
    require_content(directory, _SAVE)
    logger.warning("removing %s, which a save that was killed has left", path)
    return rename_away(path, parent, directory)


def rename_away(path: Path, parent: int, directory: int) -> str:
    """Rename the directory open as `directory` to the name of an ended save, and return that name. This comes before
    its removal, so that no rank of the save writes to the rest or publishes it. Raises OSError."""
    name = path.name
    ended = ended_name(name)
    if ended != name and is_at(name, parent, directory):
        with contextlib.suppress(FileNotFoundError):
            os.rename(name, ended, src_dir_fd=parent, dst_dir_fd=parent)
    return ended


def ended_name(name: str) -> str:
    """Return the name that `rename_away` gives."""
    return name if name.endswith(_ENDED) else name + _ENDED
