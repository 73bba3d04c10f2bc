"""The directory of a checkpoint that is being written, and the rename that makes it current.

    save_dir/.ds_slide_saving.<id>/    locked (flock) by the process that publishes, for as long as it lives
        lock
        <tag>/                         the files, then their manifest
        zero_to_fp32.py, latest        files that go beside the tag

A kill -9 leaves a loadable checkpoint at every moment. Before the rename: the old tag and `latest` are unchanged, and
the next save into save_dir removes the new directory, whose lock is free. The rename is one system call. It exchanges
an existing tag with the new one, so the tag is never absent. After the rename: the new tag is whole, because files,
manifest and directories were synced before. `latest` names the old tag or, after a second rename, the new one, and
either loads. A file system that cannot exchange (NFS, some overlays) needs two renames. The old tag is first renamed to
`.ds_slide_replaced.<tag>`. After a kill between the two, the next load or save renames it back (leftovers.py).

Other users may be able to write to save_dir. So the directory of a save is reached by its descriptor, opened without
following a link and checked to be ours. Renames and removals use names relative to it and to save_dir.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiofiles

from ds_slide.checkpoint.leftovers import (
    SAVING,
    checked_tag,
    ended_name,
    recover,
    remove_dead_saves,
    rename_away,
    replaced_name,
)
from ds_slide.checkpoint.manifest import manifest_now, write_durably
from ds_slide.checkpoint.sums import Sum
from ds_slide.errors import SlideError
from ds_slide.store.directories.locked_directory import LockedDirectory, make_locked, remove_unlocked
from ds_slide.store.directories.owned_directory import (
    below,
    obstacle,
    opened,
    owned,
    status_of,
    warn_if_writable_by_others,
)

__all__ = ["SAVING", "Staging", "checked_tag", "new_name", "reached", "recover"]

logger = logging.getLogger(__name__)

_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def new_name() -> str:
    """Make a name for the directory of one save. All its ranks use the same name."""
    return SAVING + uuid.uuid4().hex[:16]


def reached(_phase: str) -> None:
    """Do nothing. The save has reached `_phase`, and tests kill the process here."""


class Staging:
    """The directory `save_dir`/`name` of the publishing process, from `open` until `discard`."""

    def __init__(self, save_dir: Path, name: str) -> None:
        self.save_dir = save_dir
        self.path = save_dir / name
        self._held: LockedDirectory | None = None

    def open(self, tag: str) -> None:
        """Remove leftovers of dead saves, then make and lock the directory, and make the tag's directory in it. Raises
        OSError. Raises SlideError, before it makes anything, where the tag could not be put in its place."""
        self.save_dir.mkdir(parents=True, exist_ok=True)
        recover(self.save_dir)
        with opened(self.save_dir) as parent:
            _require_place(tag, parent, self.save_dir)
            warn_if_writable_by_others(parent, self.save_dir, "save_dir")
            remove_dead_saves(self.save_dir, parent)
            self._held = make_locked(self.path, parent, 0o777, without_locks=True)
        if self._held is None:
            # Another save began to remove stale directories before this save had its lock.
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(self.path))
        with below(tag.split("/"), self._held.directory, make=True):
            pass

    @property
    def present_path(self) -> Path:
        """A path of the open directory, also after a change of its name."""
        return self.path if self._held is None else _as_path(self._held.directory, self.path)

    def free_bytes(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def publish(self, tag: str, files: Mapping[str, Sum], *, latest: bool) -> None:
        """Write the manifest of `files` and make the tag current. Then move the scripts in this directory and, if asked
        for, `latest`. Raises OSError, and SlideError where a file is not as it was written."""
        with opened(self.save_dir) as parent, owned(self.path.name, parent) as own:
            manifest = manifest_now(files)
            manifest.check(self.path / tag, ())
            manifest.write(_as_path(own, self.path) / tag)
            scripts = [name for name in os.listdir(own) if name.endswith(".py")]
            self._publish_tag(tag, parent, own)
            reached("renamed")
            for script in scripts:
                os.replace(script, script, src_dir_fd=own, dst_dir_fd=parent)
            if latest:
                write_durably(_as_path(own, self.path) / "latest", tag.encode())
                reached("before latest")
                os.replace("latest", "latest", src_dir_fd=own, dst_dir_fd=parent)
            os.fsync(parent)
            reached("published")

    def _publish_tag(self, tag: str, parent: int, own: int) -> None:
        """Rename the tag. `parent` and `own`: descriptors of save_dir and of the directory of this save."""
        *above, last = tag.split("/")
        with below(above, own) as new, below([last], new) as content:
            os.fsync(content)
            with below(above, parent, make=True) as target:
                reached("before the rename")
                if status_of(last, target) is not None:
                    _replace(tag, parent, new, target)
                else:
                    os.rename(last, last, src_dir_fd=new, dst_dir_fd=target)
                os.fsync(target)
            os.fsync(parent)

    def remove(self) -> None:
        """Remove the directory and its content. Any rank that has published may call this. The checkpoint is there, so
        a failure is only a warning, and the next save tries again."""
        try:
            with opened(self.save_dir) as parent, owned(self.path.name, parent) as own:
                remove_unlocked(rename_away(self.path, parent, own), parent, own)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                path = self.save_dir / ended_name(self.path.name)
                logger.warning("%s cannot be removed (%s); the next save tries again", path, error)

    def discard(self) -> None:
        """Remove the directory and its content: a failed save, or the checkpoint that was replaced. Raises OSError."""
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(FileNotFoundError):
                held.remove(rename_away)


def _require_place(tag: str, parent: int, save_dir: Path) -> None:
    """Raise SlideError unless each part of the tag in save_dir, open as `parent`, is a directory or not there."""
    parts = tag.split("/")
    for level, part in enumerate(parts):
        with below(parts[:level], parent) as above:
            what = obstacle(part, above)
            if what is not None:
                path = save_dir.joinpath(*parts[: level + 1])
                raise SlideError(
                    f"the checkpoint tag {tag!r} cannot be saved in {save_dir}: {path} is {what}, and a checkpoint is "
                    "renamed into its place, where only a directory of the same file system can be; use another tag or "
                    "another save_dir"
                )
            if status_of(part, above) is None:
                return


def _replace(tag: str, parent: int, new: int, target: int) -> None:
    """Exchange the tag's directory in `new` with the old one in `target`. `parent`, `new` and `target` are descriptors.
    `parent` is open on save_dir."""
    last = tag.rpartition("/")[2]
    if _exchange(last, new, target):
        return
    replaced = replaced_name(tag)
    os.rename(last, replaced, src_dir_fd=target, dst_dir_fd=parent)
    try:
        os.fsync(parent)
        reached("renamed away")
        os.rename(last, last, src_dir_fd=new, dst_dir_fd=target)
    except BaseException:
        with contextlib.suppress(OSError):  # the next load or save tries again
            os.rename(replaced, last, src_dir_fd=parent, dst_dir_fd=target)
        raise
    os.rename(replaced, last, src_dir_fd=parent, dst_dir_fd=new)


def _exchange(name: str, one: int, other: int) -> bool:
    """Exchange the entries `name` of two directories in one system call. False where the system cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    exchange = ctypes.c_uint(2)  # RENAME_EXCHANGE
    if rename(one, os.fsencode(name), other, os.fsencode(name), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), name)


def _as_path(descriptor: int, otherwise: Path) -> Path:
    """Return a path of an open directory, for functions that take only paths. Without /proc it is `otherwise`."""
    path = Path(f"/proc/self/fd/{descriptor}")
    return path if path.exists() else otherwise


# ----------------------------------------------------------------------------------------------------------------------
# The ranks agree through the save's directory, without a collective, that an asynchronous checkpoint is complete.
#
# A helper thread may issue no collective (docs/liveness.md). So each rank's thread writes and syncs its files, and then
# puts a marker into the directory of the save: a file with their sums. Then it looks for the markers of all ranks. The
# last rank sees all markers and publishes. If two ranks see all markers at once, the rank that creates one more file
# publishes. No rank waits for another one. A file system may show the files of other ranks late (NFS), so that no rank
# sees all markers. Then the publisher publishes when all ranks meet next, at the next save or load.
#
# The files are small and written through aiofiles, in this thread: at the interpreter's end no pool takes work any
# more.

_PUBLISHING = f"{SAVING}publishing"


@dataclass(frozen=True)
class Agreement:
    """The data that `ranks` ranks share to write the tag in `staging`. `latest`: whether the tag becomes the latest."""

    staging: Staging
    tag: str
    ranks: int
    latest: bool

    def finish(self, rank: int, files: Mapping[str, Sum]) -> None:
        """Mark the files of `rank` as written, and publish if they are the last. Raises OSError, SlideError."""
        content = {name: [found.nbytes, found.crc] for name, found in files.items()}
        marker = self._marker(rank)
        beside = marker.with_suffix(".new")
        asyncio.run(_write(beside, json.dumps(content).encode()))
        os.replace(beside, marker)  # whole when it appears; not synced, because it is not read after a crash
        reached(f"rank {rank} has finished")
        self.publish_if_complete()

    def publish_if_complete(self) -> None:
        """Publish when the files of all ranks are there and no other rank has begun. Raises OSError, SlideError."""
        markers = [self._marker(rank) for rank in range(self.ranks)]
        if not all(marker.exists() for marker in markers):  # or another rank has published, and removed them
            return
        try:
            os.close(os.open(self.staging.path / _PUBLISHING, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC))
        except (FileExistsError, FileNotFoundError):
            return
        files = {name: Sum(*found) for content in asyncio.run(_read(markers)) for name, found in content.items()}
        self.staging.publish(self.tag, files, latest=self.latest)
        self.staging.remove()

    def _marker(self, rank: int) -> Path:
        """Return the path of a rank's marker. No tag has such a name (`checked_tag`)."""
        return self.staging.path / f"{SAVING}rank{rank}.json"


class _Here(Executor):
    """Runs every submitted function at once. (`async with` of an aiofiles file would close it in the loop's pool.)"""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


async def _write(path: Path, content: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    file = await aiofiles.open(path, "xb", executor=_Here())
    try:
        await file.write(content)
    finally:
        await file.close()


async def _read(paths: list[Path]) -> list[dict[str, list[int]]]:
    contents = []
    for path in paths:
        file = await aiofiles.open(path, "rb", executor=_Here())
        try:
            contents.append(json.loads(await file.read()))
        finally:
            await file.close()
    return contents
