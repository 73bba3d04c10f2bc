"""The manifest of a checkpoint: size and CRC-32 of every file. It shows whether a checkpoint is broken.

The manifest is written last into a directory that then becomes the tag by one rename. So a tag with a manifest was
whole when it appeared, and any damage came later. Stock's tags have no manifest. It shows damage, not intent: a user
who can write the files can write the manifest too. So reading does not trust it (`restricted`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from ds_slide.checkpoint.sums import Sum, regular_file, sum_of_file
from ds_slide.errors import SlideError
from ds_slide.report.log import size

NAME = "ds_slide_manifest.json"
_FORMAT = 1


def _file_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > 255:
        raise ValueError("no name of a file in this directory")
    return name


class _File(BaseModel):
    model_config = ConfigDict(strict=True)
    bytes: Annotated[int, Field(ge=0, lt=1 << 63)]
    crc32: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]


class _Content(BaseModel):
    model_config = ConfigDict(strict=True)
    format: int
    saved_at: FiniteFloat
    files: dict[Annotated[str, AfterValidator(_file_name)], _File]


@dataclass(frozen=True)
class Manifest:
    """The files of a tag and their sums. `files`: sums by name in the tag's directory. `saved_at`: seconds since the
    epoch."""

    files: Mapping[str, Sum]
    saved_at: float

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Read the manifest of a tag, None where it is missing. Raises SlideError where it cannot be read."""
        path, most = directory / NAME, 16 << 20  # bytes of more than a hundred thousand files
        try:
            with regular_file(path) as file:
                data = file.read(most + 1)
            if len(data) > most:
                raise ValueError(f"more than {size(most)}")
            value = json.loads(data.decode(), object_pairs_hook=_without_duplicates)
            if isinstance(value, dict) and value.get("format") in range(_FORMAT + 1, 1000):
                raise SlideError(
                    f"{path} has format {value['format']} and this version of DS-Slide knows {_FORMAT}; load the "
                    "checkpoint with the version that wrote it"
                )
            content = _Content.model_validate(value)
            if content.format != _FORMAT:
                raise ValueError("unknown format")
        except FileNotFoundError as error:
            if path.is_symlink():
                raise _broken(path, "is a symbolic link to nothing") from error
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise SlideError(
                f"{path} cannot be read ({_reason(error)}), so the checkpoint is broken; load another tag or a copy "
                "of this one"
            ) from error
        files = {name: Sum(entry.bytes, int(entry.crc32, 16)) for name, entry in content.files.items()}
        return cls(files, content.saved_at)

    def write(self, directory: Path) -> None:
        """Write and fsync the manifest. Raises OSError."""
        files: dict[str, Any] = {
            name: {"bytes": found.nbytes, "crc32": f"{found.crc:08x}"} for name, found in sorted(self.files.items())
        }
        content = {"format": _FORMAT, "saved_at": self.saved_at, "files": files}
        write_durably(directory / NAME, json.dumps(content, indent=1).encode())

    def check(self, directory: Path, contents_of: Collection[str]) -> None:
        """Raise SlideError when a file is missing or has another size. The bytes of the files `contents_of` are
        compared."""
        for name, expected in self.files.items():
            path = directory / name
            try:
                if more := path.stat().st_size - expected.nbytes:
                    by = f"{size(abs(more))} {'longer' if more > 0 else 'shorter'}"
                    raise _broken(path, f"is {by} than when it was saved ({size(expected.nbytes)})")
                if name in contents_of and (found := sum_of_file(path)) != expected:
                    raise _broken(path, f"has CRC-32 {found.crc:08x} instead of {expected.crc:08x}")
            except OSError as error:
                raise _broken(path, f"cannot be read ({error.strerror})") from error

    def check_listed(self, directory: Path, names: Iterable[str]) -> None:
        """Raise SlideError where one of `names` is not in the manifest."""
        for name in sorted(set(names) - self.files.keys()):
            raise _broken(directory / name, f"is not in {NAME}")


def manifest_now(files: Mapping[str, Sum]) -> Manifest:
    return Manifest(files, time.time())


def newest_whole_tag(save_dir: Path, besides: Collection[str]) -> str | None:
    """Return the newest tag below `save_dir` that agrees with its manifest in every byte, None if there is none."""
    found = []
    paths: list[Path] = []
    with contextlib.suppress(OSError):  # a tag that cannot be read is not known to be whole
        paths.extend(save_dir.glob(f"[!.]*/**/{NAME}"))
    for path in paths:
        tag = path.parent.relative_to(save_dir).as_posix()
        try:
            manifest = Manifest.read(path.parent)
        except SlideError:
            continue
        if manifest is not None and tag not in besides:
            found.append((manifest.saved_at, tag, manifest))
    for _, tag, manifest in sorted(found, key=lambda item: item[0], reverse=True):
        try:
            manifest.check(save_dir / tag, manifest.files)
        except SlideError:
            continue
        return tag
    return None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key twice in one object")
    return result


def _reason(error: Exception) -> str:
    """Return the error's reason on one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return ascii(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:300])[1:-1]
    if isinstance(error, OSError):
        return f"{error.strerror}"
    return ascii(f"{type(error).__name__}: {error}"[:300])[1:-1]


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
