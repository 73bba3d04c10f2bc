"""Our own directories, below a directory where other users may make, rename and replace entries.

A name can mean something else at every lookup, so it is looked up once. `open_owned` returns a descriptor after it has
checked the entry: a directory, no symbolic link, owned by us, and no mount point. Everything below is reached from that
descriptor (openat, unlinkat, renameat), and nothing is removed through a path.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import logging
import os
import pwd
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Content:
    """The entries that an `owner`, such as "save", puts into its directory. `files`: the names of files at the top.
    `files_below`: the names of files in directories, None where the owner makes no directories."""

    owner: str
    files: re.Pattern[str]
    files_below: re.Pattern[str] | None = None

    def has(self, name: str, *, is_directory: bool, level: int) -> bool:
        """Whether the owner makes an entry of this name, `level` directories below the top."""
        if is_directory:
            return self.files_below is not None and name.isprintable()
        names = self.files_below if level else self.files
        return names is not None and names.fullmatch(name) is not None


_READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Deeper than any tag. Every level holds a descriptor open.
_MOST_LEVELS = 32
# Errors of O_TMPFILE that a named file would meet as well. Other errors may concern nameless files only.
_NO_FILES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
# Errors for a removed directory that is still open. FUSE and NFS, which use paths for open directories, give them.
REMOVED = (errno.ENOENT, errno.ESTALE)
_HIDDEN = re.compile(r"\.(nfs|fuse_hidden)[0-9A-Fa-f]+")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a directory that the user has named; symbolic links in the path are followed. Raises OSError."""
    descriptor = os.open(path, _READ_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def owned(name: str, parent: int) -> Iterator[int]:
    """Open a directory with `open_owned` and close it at the end."""
    descriptor = open_owned(name, parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_owned(name: str, parent: int) -> int:
    """Open our directory `name` in the directory open as `parent`. Raises OSError where it is not ours."""
    try:
        descriptor = os.open(name, _READ_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _not_ours(name, "it is no directory") from error
        raise
    try:
        _require_ours(name, parent, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def below(parts: Sequence[str], top: int, *, make: bool = False) -> Iterator[int]:
    """Open the directory `parts` below the directory open as `top`. No symbolic link is followed on the way.

    `make`: missing directories are made, with the permissions that the umask gives. Raises OSError.
    """
    descriptor = os.dup(top)
    try:
        for name in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=descriptor)
            upper, descriptor = descriptor, os.open(name, _READ_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(upper)
        yield descriptor
    finally:
        os.close(descriptor)


def status_of(name: str, parent: int) -> os.stat_result | None:
    """Return the status of the entry, None where it is missing. A symbolic link is not followed."""
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def is_at(name: str, parent: int, descriptor: int) -> bool:
    """Whether the name now means the file or directory open as `descriptor`."""
    found = status_of(name, parent)
    try:
        return found is not None and os.path.samestat(found, os.fstat(descriptor))
    except OSError as error:
        if error.errno not in REMOVED:
            raise
        return False


def _is_removed(directory: int) -> bool:
    try:
        return os.fstat(directory).st_nlink == 0
    except OSError as error:
        if error.errno not in REMOVED:
            raise
        return True


def obstacle(name: str, parent: int) -> str | None:
    """Return words for an entry that no directory can be renamed to or below. None where the entry is missing or is a
    directory on the file system of `parent`, with any owner. Raises OSError."""
    try:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        return None
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISLNK(mode):
            return "a symbolic link"
        if not stat.S_ISDIR(mode):
            return "no directory"
        return None if _on_same_mount(descriptor, parent) else "a mount point"
    finally:
        os.close(descriptor)


def is_hidden(name: str) -> bool:
    """Whether NFS or FUSE gives this name to an open file that is unlinked. The name goes when the file is closed. It
    stays for ever where the machine or the FUSE process dies before that."""
    return _HIDDEN.fullmatch(name) is not None


def first_foreign(directory: int, content: Content, level: int = 0) -> str | None:
    """Return the first entry in the directory or below that is not ours, None where all may be ours. Ours are regular
    files and directories of our user on this file system. Their names are of `content` or, for a file, `is_hidden`."""
    for name in sorted(os.listdir(directory)):
        found = status_of(name, directory)
        if found is None:
            continue
        is_directory = stat.S_ISDIR(found.st_mode)
        is_known = content.has(name, is_directory=is_directory, level=level)
        is_known = is_known or (is_hidden(name) and not is_directory)
        if not is_known or level == _MOST_LEVELS:
            return name
        if is_directory:
            try:
                with owned(name, directory) as inner:
                    foreign = first_foreign(inner, content, level + 1)
            except OSError:
                return name
            if foreign is not None:
                return f"{name}/{foreign}"
        elif not stat.S_ISREG(found.st_mode):
            return name
    return None


def remove_contents(directory: int, *, last: str | None = None, level: int = 0) -> None:
    """Remove everything in the directory, the file `last` after all others. Another process may remove entries too.

    A directory in it that is not ours stays with its content, and then `last` stays too. Raises OSError for the first
    entry that could not be removed, after the others.
    """
    if level == _MOST_LEVELS:
        raise OSError(errno.ELOOP, "it has too many levels of directories")
    failure: OSError | None = None
    for name in sorted(_names(directory), key=lambda name: (name == last, name)):
        if failure is not None and name == last:
            break
        try:
            _remove_entry(name, directory, level)
        except OSError as error:
            if error.errno not in REMOVED:
                failure = failure or error
    if failure is not None:
        raise failure


def _names(directory: int) -> list[str]:
    """List the directory. A removed directory is empty, like on a local file system."""
    try:
        return os.listdir(directory)
    except OSError as error:
        if error.errno in REMOVED:
            return []
        raise


def _remove_entry(name: str, directory: int, level: int) -> None:
    if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        with owned(name, directory) as inner:
            remove_contents(inner, level=level + 1)
        os.rmdir(name, dir_fd=directory)
    else:
        os.unlink(name, dir_fd=directory)


def remove_empty(name: str, parent: int, directory: int) -> bool:
    """Remove the empty directory open as `directory`: `name` in `parent`, or the name that it has now.

    Returns False where its name cannot be found. rmdir removes only an empty directory. Raises OSError.
    """
    for _ in range(100):  # another process may rename it all the time: one attempt finds it under the name just seen
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # renamed since it was seen
            if is_at(name, parent, directory):
                os.rmdir(name, dir_fd=parent)
                return True
            path = present_path(directory)
            if _is_removed(directory) or (path is not None and path.endswith(" (deleted)")):
                return True  # another process has removed it
            if path is None:
                return False
            with opened(Path(path).parent) as elsewhere:
                if is_at(os.path.basename(path), elsewhere, directory):
                    os.rmdir(os.path.basename(path), dir_fd=elsewhere)
                    return True
    return False


def present_path(descriptor: int) -> str | None:
    """Return the kernel's path of an open file or directory, None without /proc."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None


def unnamed_file(directory: int) -> int | None:
    """Make a file (mode 0600) without a name on the directory's file system, and open it for reading and writing.

    Returns None where the file system has no such files (NFS, FUSE, older overlays). Raises OSError.
    """
    try:
        return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno in _NO_FILES:
            raise
        return None


def _require_ours(name: str, parent: int, descriptor: int) -> None:
    found = os.fstat(descriptor)
    if not _on_same_mount(descriptor, parent):
        raise _not_ours(name, "another file system is mounted there")
    if found.st_uid != os.geteuid() and found.st_uid != _owner_of_new_files(parent):
        raise _not_ours(name, f"it belongs to user {found.st_uid}")


def _on_same_mount(descriptor: int, parent: int) -> bool:
    """Whether both are on one mount. A bind mount of the same file system has the same device but another mount."""
    same_device = os.fstat(descriptor).st_dev == os.fstat(parent).st_dev
    return same_device and _mount_of(descriptor) == _mount_of(parent)


def _not_ours(name: str, reason: str) -> OSError:
    return OSError(errno.EPERM, f"{reason}, so it is none of ours", name)


def _mount_of(descriptor: int) -> str | None:
    """Return the kernel's line with the mount id of an open file, None where the kernel does not tell."""
    try:
        with open(f"/proc/self/fdinfo/{descriptor}") as lines:
            return next((line for line in lines if line.startswith("mnt_id:")), None)
    except OSError:
        return None


def _owner_of_new_files(parent: int) -> int:
    """Return the user that owns our new files: an NFS server may map us to another user. Our own id where we cannot
    write."""
    name = None
    try:
        descriptor = unnamed_file(parent)
        if descriptor is None:
            name = f".ds_slide_owner.{secrets.token_hex(6)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o600, dir_fd=parent)
    except OSError:
        return os.geteuid()
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=parent)


# ----------------------------------------------------------------------------------------------------------------------
# One warning for a directory where other users may make, rename or remove entries.

_log = logging.getLogger("ds_slide")
_said: set[tuple[int, int]] = set()
"""(device, inode) of the directories that this process has warned of."""


def warn_if_writable_by_others(directory: int, path: Path, json_path: str) -> None:
    """Warn, once a process and machine, when other users may write to the directory open as `directory`."""
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
    """Whether the group has our user's name and no other member. Many systems make such a group for each user."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except (KeyError, OSError):
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
