"""Opening what lies in a checkpoint directory, which anybody may have put there.

A FIFO would block whoever opens it, a device may do something when it is opened, and a directory cannot be read. So
only regular files are opened, be it through a symbolic link: the Hub's cache consists of links to files.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ds_slide.errors import SlideError

_NAME_LIMIT = 4096
"""Bytes that `latest` may hold: no path is longer."""
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextlib.contextmanager
def regular_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Raises OSError, and SlideError where `path` is anything else."""
    _require_regular(path, os.stat(path).st_mode)  # first, as opening a device may already do something
    # Not blocking: a FIFO may have taken the file's place since then.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        _require_regular(path, os.fstat(descriptor).st_mode)
        yield file


def tag_in(path: Path) -> str:
    """The tag that a file such as `latest` names. Raises SlideError, which names the file."""
    try:
        with regular_file(path) as file:
            content = file.read(_NAME_LIMIT + 1)
    except OSError as error:
        raise _no_tag(path, f"cannot be read ({error.strerror})") from error
    if len(content) > _NAME_LIMIT:
        raise _no_tag(path, f"holds more than {_NAME_LIMIT:,} bytes")
    try:
        tag = content.decode().strip()
    except UnicodeDecodeError as error:
        raise _no_tag(path, f"is not encoded in UTF-8 ({error.reason} at byte {error.start})") from error
    parts = tag.split("/")
    if not tag.isprintable() or any(part in ("", ".", "..") or len(os.fsencode(part)) > 255 for part in parts):
        shown = ascii(tag if len(tag) <= 100 else f"{tag[:100]}...")
        raise _no_tag(path, f"holds {shown}, which names no directory below {path.parent}")
    return tag


def _require_regular(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise SlideError(
            f"the checkpoint file {os.fspath(path)} is {kind} instead of a regular file, so this checkpoint is broken; "
            "load another tag or a copy of this one"
        )


def _no_tag(path: Path, how: str) -> SlideError:
    return SlideError(f"{path}, which names the checkpoint to load, {how}; write a tag into it, or pass one")
