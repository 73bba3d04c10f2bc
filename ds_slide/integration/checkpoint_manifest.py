"""The manifest of a checkpoint: size and CRC-32 of every file, by which a broken checkpoint is recognised.

It is written last into a directory that then becomes the tag by one rename, so a tag with a manifest was whole when it
appeared; what the manifest finds has happened since. Tags without one (stock's, older ones) are loaded unchecked.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_slide.errors import SlideError
from ds_slide.integration.checkpoint_sums import Sum, sum_of_file

NAME = "ds_slide_manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """`files`: by name in the tag's directory. `saved_at`: seconds since the epoch."""

    files: Mapping[str, Sum]
    saved_at: float

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """The manifest of a tag, None where there is none. Raises SlideError for one that cannot be read."""
        path = directory / NAME
        try:
            content = json.loads(path.read_bytes())
            if content["format"] != _FORMAT:
                raise SlideError(
                    f"{path} has format {content['format']} and this version of DS-Slide knows {_FORMAT}; load the "
                    "checkpoint with the version that wrote it"
                )
            entries = content["files"].items()
            files = {name: Sum(int(entry["bytes"]), int(entry["crc32"], 16)) for name, entry in entries}
            return cls(files, float(content["saved_at"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SlideError(
                f"{path} cannot be read ({type(error).__name__}: {error}), so the checkpoint is broken; "
                "load another tag or a copy of this one"
            ) from error

    def write(self, directory: Path) -> None:
        """Write and fsync the manifest. Raises OSError."""
        files: dict[str, Any] = {
            name: {"bytes": found.nbytes, "crc32": f"{found.crc:08x}"} for name, found in sorted(self.files.items())
        }
        content = {"format": _FORMAT, "saved_at": self.saved_at, "files": files}
        write_durably(directory / NAME, json.dumps(content, indent=1).encode())

    def check(self, directory: Path, contents_of: Callable[[str], bool]) -> None:
        """Raise SlideError when a file is missing or has another size; where `contents_of` its name, other bytes."""
        for name, expected in self.files.items():
            path = directory / name
            try:
                size = path.stat().st_size
                if size != expected.nbytes:
                    raise _broken(path, f"has {size:,} bytes instead of {expected.nbytes:,}")
                if contents_of(name) and (found := sum_of_file(path)) != expected:
                    raise _broken(path, f"has CRC-32 {found.crc:08x} instead of {expected.crc:08x}")
            except OSError as error:
                raise _broken(path, f"cannot be read ({error.strerror})") from error


def manifest_now(files: Mapping[str, Sum]) -> Manifest:
    return Manifest(files, time.time())


def newest_whole_tag(save_dir: Path, besides: Collection[str]) -> str | None:
    """The newest tag below `save_dir` that has a manifest and agrees with it to the byte; None when there is none."""
    found = []
    for path in save_dir.glob(f"[!.]*/**/{NAME}"):
        tag = path.parent.relative_to(save_dir).as_posix()
        try:
            manifest = Manifest.read(path.parent)
        except SlideError:
            continue
        if manifest is not None and tag not in besides:
            found.append((manifest.saved_at, tag, manifest))
    for _, tag, manifest in sorted(found, key=lambda item: item[0], reverse=True):
        try:
            manifest.check(save_dir / tag, lambda _name: True)
        except SlideError:
            continue
        return tag
    return None


def _broken(path: Path, how: str) -> SlideError:
    return SlideError(
        f"the checkpoint file {path} {how}, so this checkpoint is broken; load another tag or a copy of this one"
    )


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and fsync it. Raises OSError."""
    with open(path, "xb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
