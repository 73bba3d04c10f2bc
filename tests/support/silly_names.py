"""A file system on which an open file that is unlinked keeps a name until it is closed, as on NFS and some FUSE."""

from __future__ import annotations

import contextlib
import errno
import os
import types
from collections.abc import Callable
from pathlib import Path

import pytest


class Calls:
    """The module os with other functions."""

    def __init__(self, **functions: Callable[..., object]) -> None:
        vars(self).update(functions)

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


def _is_open(status: os.stat_result) -> bool:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(int(descriptor)), status):
                return True
    return False


def _unlink(name: str, *, dir_fd: int) -> None:
    status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    if not _is_open(status):
        os.unlink(name, dir_fd=dir_fd)
    elif name.startswith(".nfs"):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), name)
    else:
        os.rename(name, f".nfs{status.st_ino:016x}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def _close(descriptor: int) -> None:
    status, path = os.fstat(descriptor), Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    os.close(descriptor)
    if path.name.startswith(".nfs") and not _is_open(status):
        path.unlink()


def keep_names(monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType) -> None:
    """For these modules; only what this process has open counts."""
    for module in modules:
        monkeypatch.setattr(module, "os", Calls(unlink=_unlink, close=_close))
