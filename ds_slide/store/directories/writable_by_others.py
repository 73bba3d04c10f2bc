"""One warning for a directory in which other users may make, rename or remove entries."""

from __future__ import annotations

import grp
import logging
import os
import pwd
import stat
from pathlib import Path

_log = logging.getLogger("ds_slide")
_said: set[tuple[int, int]] = set()
"""(device, inode) of the directories that this process has warned of."""


def warn_if_writable_by_others(directory: int, path: Path, json_path: str) -> None:
    """Warn, once a process and machine, when others may write to the directory that is open as `directory`."""
    status = os.fstat(directory)
    key = (status.st_dev, status.st_ino)
    others = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid))
    if not others or key in _said or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    _said.add(key)
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    if status.st_mode & stat.S_ISVTX:
        risk = "fill it and put entries beside ours, although not rename or remove ours (it is sticky)"
    else:
        risk = "fill it, and rename, remove or replace what we write there"
    _log.warning(
        "%s: %s is writable by other users (mode %s), who can %s; name a directory that only you can write to",
        json_path,
        path,
        mode,
        risk,
    )


def _is_private(group: int) -> bool:
    """Whether this is a group that has our user's name and no other member, as many systems give to each user."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except (KeyError, OSError):
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
