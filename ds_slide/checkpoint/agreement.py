"""How the ranks agree, without a collective, that an asynchronous checkpoint is complete: through its directory.

A helper thread may issue no collective (docs/liveness.md). So each rank's thread, when its files are written and
synced, puts a file with their sums into the directory of the save, its marker, and then looks whether the markers of
all ranks are there. The last one sees all of them, and publishes; two that see all of them at once settle it by
creating one file. Nobody waits for another rank. Where a file system shows a rank the files of others late (NFS),
nobody may see all of them: then the publisher does it when all ranks meet next, at the next save or load.

The files are small and written through aiofiles, in this thread: at the interpreter's end no pool takes work any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiofiles

from ds_slide.checkpoint.publish import SAVING, Staging, reached
from ds_slide.checkpoint.sums import Sum

_PUBLISHING = f"{SAVING}publishing"


@dataclass(frozen=True)
class Agreement:
    """What the `ranks` ranks share that write the tag in `staging`. `latest`: whether it is to become the latest."""

    staging: Staging
    tag: str
    ranks: int
    latest: bool

    def finish(self, rank: int, files: Mapping[str, Sum]) -> None:
        """Say that the files of `rank` are written, and publish if they are the last. Raises OSError, SlideError."""
        content = {name: [found.nbytes, found.crc] for name, found in files.items()}
        marker = self._marker(rank)
        beside = marker.with_suffix(".new")
        asyncio.run(_write(beside, json.dumps(content).encode()))
        os.replace(beside, marker)  # whole when it appears; not synced: after a crash nobody reads it
        reached(f"rank {rank} has finished")
        self.publish_if_complete()

    def publish_if_complete(self) -> None:
        """Publish when the files of all ranks are there and nobody else has begun to. Raises OSError, SlideError."""
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
        """No tag has such a name (`checked_tag`)."""
        return self.staging.path / f"{SAVING}rank{rank}.json"


class _Here(Executor):
    """Runs at once what is submitted. (`async with` of an aiofiles file would close it in the loop's own pool.)"""

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
